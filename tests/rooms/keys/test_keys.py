"""Keys with scopes: what each may do, rotation under a running gateway, a log of who changed what, no key in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from msgspec import UNSET
from msgspec.structs import replace

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.keys import OWNERS
from contracts.encoding.wire import encode, encode_json
from contracts.errors import Conflict, InvalidInput, Unavailable
from contracts.events import StateChanged
from contracts.jobs import JobState
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.services import own_job
from onbeat.base.http import change_log
from onbeat.base.http.access import SCOPES, Caller
from onbeat.base.telemetry.logs import HumanLines, JsonLines
from onbeat.cli import run
from onbeat.commands.keys import add, revoked, rotated
from tests.builders import job_spec, stub_model
from tests.served import CLIENT, asked, services_over


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may what\n")
    return path


@pytest.fixture
def settings(settings: StackSettings, keys: Path, tmp_path: Path) -> StackSettings:
    """Settings with a file of keys, over a model root that holds the model of `job_spec`."""
    stub_model(tmp_path / "models" / "qwen3")
    return replace(settings, keys_file=str(keys), model_root=str(tmp_path / "models"))


@pytest.fixture
def ann() -> str:
    """The name of a key that no other test of this server has."""
    return f"ann-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def app(settings: StackSettings) -> Iterator[FastAPI]:
    with services_over(settings) as services:
        services.jobs.create(job_spec())
        yield create_app(services)


def ask(app: FastAPI, key: str, method: str = "GET", path: str = "/v1/jobs") -> httpx.Response:
    return asked(app, method, path, key=key)


NONE = "/v1/jobs/job-0123456789ab"


@pytest.mark.parametrize(
    ("method", "path", "needs"),
    [
        ("GET", "/v1/jobs", "read"),
        ("HEAD", "/v1/jobs", "read"),
        ("GET", f"{NONE}/spec", "read"),
        ("POST", "/v1/jobs/check", "submit"),
        ("POST", "/v1/jobs", "submit"),
        ("POST", f"{NONE}/cancel", "submit"),
        ("POST", f"{NONE}/resume", "submit"),
        ("PATCH", NONE, "submit"),
        ("DELETE", NONE, "submit"),
    ],
)
def test_a_key_may_do_what_its_scope_says_and_no_more(
    app: FastAPI, keys: Path, method: str, path: str, needs: str
) -> None:
    for scope in SCOPES:
        answer = ask(app, add(keys, f"one-{scope}", scope), method, path)
        if SCOPES.index(scope) < SCOPES.index(needs):
            assert answer.status_code == 403
            assert answer.json()["detail"] == f"the key of one-{scope} has the scope {scope}"
            assert answer.json()["cure"] == f"use one with {needs}"
        else:
            assert answer.status_code not in (401, 403)


def job_of(app: FastAPI, key: str) -> str:
    """The id of a new job of the key."""
    answer = submitted(app, key)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"]


def submitted(app: FastAPI, key: str, **headers: str) -> httpx.Response:
    headers |= {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return asked(app, "POST", "/v1/jobs", headers=headers, content=encode_json(job_spec()))


def test_a_key_changes_its_own_jobs_and_the_scope_admin_all(app: FastAPI, keys: Path, ann: str) -> None:
    own, other, of_admin = add(keys, ann, "submit"), add(keys, "ben", "submit"), add(keys, "root", "admin")
    job_id = job_of(app, own)
    assert ask(app, other, "GET", f"/v1/jobs/{job_id}").json()["owner"] == ann
    changes = [("POST", f"/v1/jobs/{job_id}/cancel"), ("POST", f"/v1/jobs/{job_id}/resume")]
    changes += [("POST", f"/v1/jobs/{job_id}/dead/1-0/retry"), ("DELETE", f"/v1/jobs/{job_id}")]
    for method, path in changes:
        answer = ask(app, other, method, path)
        assert answer.status_code == 403, path
        problem = f"job {job_id} was submitted by {ann}, and the key of ben may change only its own jobs"
        assert answer.json()["detail"] == problem
        assert answer.json()["cure"] == f"use the key of {ann}, or one with the scope admin"
    assert ask(app, other, "GET", f"/v1/jobs/{job_id}").json()["state"] == "queued", "nothing was done"
    assert ask(app, own, "POST", f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    assert ask(app, of_admin, "POST", f"/v1/jobs/{job_id}/resume").json()["state"] == "queued"
    assert ask(app, "test-key", "POST", f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    assert ask(app, own, "DELETE", f"/v1/jobs/{job_id}").status_code == 204


def test_two_keys_with_the_same_idempotency_key_have_a_job_each(app: FastAPI, keys: Path, ann: str) -> None:
    once = {"Idempotency-Key": uuid.uuid4().hex}
    own, other = add(keys, ann, "submit"), add(keys, f"not-{ann}", "submit")
    answers = [submitted(app, key, **once) for key in (own, other, "test-key", own)]
    assert [answer.status_code for answer in answers] == [201, 201, 201, 200]
    first, of_other, of_operator, again = (answer.json() for answer in answers)
    assert again["job_id"] == first["job_id"]
    assert len({first["job_id"], of_other["job_id"], of_operator["job_id"]}) == 3
    assert [first["owner"], of_other["owner"], of_operator["owner"]] == [ann, f"not-{ann}", "the operator"]


def test_every_endpoint_that_changes_a_job_asks_whose_it_is(app: FastAPI) -> None:
    """A verification changes nothing: it is for each key that may submit."""
    changing = {
        f"{method} {route.path}": own_job in [dependency.call for dependency in route.dependant.dependencies]
        for route in app.state.routes
        for method in route.methods - {"GET", "HEAD"}
        if "{job_id}" in route.path
    }
    assert len(changing) >= 5
    assert {place for place, is_own in changing.items() if not is_own} == {"POST /v1/jobs/{job_id}/verify"}


def test_a_job_that_no_key_submitted_is_the_operators(app: FastAPI, keys: Path, ann: str) -> None:
    job_id, _ = app.state.services.jobs.create(job_spec())
    answer = ask(app, add(keys, ann, "submit"), "POST", f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == 403
    assert "was submitted by the operator" in answer.json()["detail"]


def test_a_key_has_so_many_jobs_and_leaves_others_their_room(settings: StackSettings, keys: Path, ann: str) -> None:
    with services_over(replace(settings, max_key_jobs=2)) as services:
        app = create_app(services)
        own, other = add(keys, ann, "submit"), add(keys, f"not-{ann}", "submit")
        first = job_of(app, own)
        job_of(app, own)
        refused = submitted(app, own)
        assert refused.status_code == 409
        assert "ONBEAT_MAX_KEY_JOBS allows 2" in refused.json()["detail"]
        job_of(app, other)
        for _ in range(4):
            job_of(app, "test-key")
        assert ask(app, own, "POST", f"/v1/jobs/{first}/cancel").status_code == 200
        assert ask(app, own, "DELETE", f"/v1/jobs/{first}").status_code == 204
        job_of(app, own)


def test_a_removal_gives_a_key_its_room_back_and_a_key_without_jobs_leaves_nothing(
    jobs: JobStore, broker: Broker, ann: str
) -> None:
    limits = {"max_own_jobs": 5, "max_own_spec_bytes": 3 * len(encode(job_spec())) - 1}
    job_ids = [jobs.create(job_spec(), owner=ann, **limits)[0] for _ in range(2)]
    with pytest.raises(Conflict, match="ONBEAT_MAX_KEY_SPECS_MB"):
        jobs.create(job_spec(), owner=ann, **limits)
    jobs.create(job_spec(), owner=f"not-{ann}", **limits)
    for job_id in job_ids:
        jobs.move(job_id, JobState.CANCELLED)
        jobs.remove(job_id)
    assert broker.redis.hmget(OWNERS, f"{ann} jobs", f"{ann} bytes", f"not-{ann} jobs") == [None, None, b"1"]
    jobs.create(job_spec(), owner=ann, **limits)


def test_a_key_has_so_many_event_streams_and_leaves_others_theirs(settings: StackSettings) -> None:
    with services_over(replace(settings, max_key_streams=2)) as services:
        ann, ben = Caller(name="ann", scope="read"), Caller(name="ben", scope="read")
        for _ in range(2):
            services.count_event_streams(1, ann)
        with pytest.raises(Unavailable, match="2 event streams of the key of ann are open"):
            services.count_event_streams(1, ann)
        services.count_event_streams(1, ben)
        services.count_event_streams(-1, ann)
        services.count_event_streams(1, ann)


def test_what_a_resume_changes_is_an_event_with_its_keys_name(app: FastAPI, keys: Path, ann: str) -> None:
    key = add(keys, ann, "submit")
    job_id = job_of(app, key)
    ask(app, key, "POST", f"/v1/jobs/{job_id}/cancel")
    body = b'{"iterations": 7, "on_unscorable": {"exact": 0.5}}'
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    assert asked(app, "POST", f"/v1/jobs/{job_id}/resume", headers=headers, content=body).status_code == 200
    events = [event for _, event in app.state.services.jobs.events_after(job_id, "0-0")]
    states = [(event.state, event.by, event.changes) for event in events if isinstance(event, StateChanged)]
    changes = ("iterations: 4 → 7", "reward.components.0.on_unscorable: fail → 0.5")
    assert states == [(JobState.QUEUED, ann, UNSET), (JobState.CANCELLED, ann, UNSET), (JobState.QUEUED, ann, changes)]


def test_a_name_keeps_its_jobs_while_its_key_is_rotated(app: FastAPI, keys: Path, ann: str) -> None:
    older = add(keys, ann, "submit")
    job_id = job_of(app, older)
    newer = rotated(keys, ann)
    assert [ask(app, key).status_code for key in (older, newer)] == [200, 200]
    revoked(keys, ann, keeps_newest=True)
    assert [ask(app, key).status_code for key in (older, newer)] == [401, 200]
    assert ask(app, newer, "POST", f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"


def test_a_key_is_rotated_without_a_restart(app: FastAPI, keys: Path) -> None:
    first = add(keys, "ann", "read")
    assert ask(app, first).status_code == 200
    second = add(keys, "ann-2027", "read")
    assert [ask(app, key).status_code for key in (first, second)] == [200, 200]
    revoked(keys, "ann")
    assert [ask(app, key).status_code for key in (first, second)] == [401, 200]
    assert ask(app, "test-key").status_code == 200, "the operator's key stays"


def test_a_file_that_is_spoilt_or_gone_leaves_the_keys_as_they_were(
    app: FastAPI, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = add(keys, "ann", "read")
    assert ask(app, key).status_code == 200
    keys.write_text("ann may read")
    assert ask(app, key).status_code == 200
    keys.unlink()
    assert ask(app, key).status_code == 200
    assert "the file of keys can't be read, so the keys from before stay valid: ONBEAT_KEYS_FILE" in caplog.text


def change_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines that the gateway has written about changes, as the JSON form has them."""
    formatter = JsonLines("gateway", "gateway")
    lines = [json.loads(formatter.format(record)) for record in caplog.records if record.name == change_log.__name__]
    caplog.clear()
    return lines


def test_each_change_has_one_line_with_its_keys_name_its_job_and_how_it_was_answered(
    app: FastAPI, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=change_log.__name__)
    own, reader = add(keys, "ann", "submit"), add(keys, "ben", "read")
    job_id = job_of(app, own)
    ask(app, own, "GET", f"/v1/jobs/{job_id}")
    ask(app, own, "POST", f"/v1/jobs/{job_id}/cancel")
    ask(app, "test-key", "DELETE", f"/v1/jobs/{job_id}")
    fields = ("key", "method", "path", "status", "job", "location")
    assert [tuple(line[name] for name in fields) for line in change_lines(caplog)] == [
        ("ann", "POST", "/v1/jobs", 201, job_id, f"/v1/jobs/{job_id}"),
        ("ann", "POST", f"/v1/jobs/{job_id}/cancel", 200, job_id, ""),
        ("the operator", "DELETE", f"/v1/jobs/{job_id}", 204, job_id, ""),
    ]
    ask(app, own, "DELETE", f"/v1/jobs/{job_id}")
    ask(app, reader, "POST", f"{NONE}/cancel")
    ask(app, "a-key-that-opens-nothing", "POST", f"{NONE}/cancel")
    asked(app, "POST", "/v1/jobs", headers={"Host": "page.example"}, key=own)
    asked(app, "POST", "/v1/jobs", headers={"Authorization": f"Bearer {own}", "Origin": "https://page.example"})
    asked(app, "POST", "/v1/jobs", key=own, content=b"{}")
    refused = [(line["key"], line["status"], line["job"]) for line in change_lines(caplog)]
    no_job = NONE.rpartition("/")[2]
    assert refused == [
        ("ann", 404, job_id),
        ("ben", 403, no_job),
        ("", 401, no_job),
        ("", 421, ""),
        ("", 403, ""),
        ("ann", 415, ""),
    ]


def test_a_line_of_a_change_names_the_address_and_holds_no_secret_and_no_control_character(
    app: FastAPI, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=change_log.__name__)
    own = add(keys, "ann", "submit")
    submitted(app, own, **{"Idempotency-Key": "a-secret-of-the-client"})
    ask(app, "a-wrong-key", "POST", f"{NONE}/cancel?secret=a-secret-of-the-client")
    ask(app, own, "POST", f"/v1/jobs/%1b[2J%0a{'x' * 10_000}")
    text = "".join(HumanLines("gateway", "gateway").format(record) for record in caplog.records)
    lines = change_lines(caplog)
    assert [line["address"] for line in lines] == [CLIENT[0]] * 3
    for secret in (own, "a-wrong-key", "test-key", "a-secret-of-the-client", hashlib.sha256(own.encode()).hexdigest()):
        assert secret not in text + json.dumps(lines)
    assert "\x1b" not in text
    assert len(lines[2]["path"]) == change_log.MAX_PATH


def test_a_request_that_ends_in_a_fault_of_the_gateway_has_its_line_too(
    app: FastAPI, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: JobStore, job_id: str, **_: object) -> None:
        raise RuntimeError("a fault")

    caplog.set_level(logging.INFO, logger=change_log.__name__)
    job_id, _ = app.state.services.jobs.create(job_spec())
    monkeypatch.setattr(JobStore, "request_cancel", fail)
    assert ask(app, "test-key", "POST", f"/v1/jobs/{job_id}/cancel").status_code == 500
    (line,) = change_lines(caplog)
    assert (line["key"], line["status"], line["job"]) == ("the operator", 500, job_id)


def test_no_key_stands_in_the_file_and_others_may_not_read_it(keys: Path) -> None:
    made = add(keys, "ann", "submit")
    assert made not in keys.read_text()
    assert keys.read_text().startswith("# who may what\nann submit ")
    assert keys.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text", ["ann read", "ann write " + "0" * 64, "a b read " + "0" * 64, ("x read " + "0" * 64 + "\n") * 2]
)
def test_a_gateway_does_not_start_with_a_file_that_it_cannot_read(
    settings: StackSettings, keys: Path, text: str
) -> None:
    keys.write_text(text)
    changed = replace(settings, keys_file=str(keys))
    with services_over(changed) as services, pytest.raises(InvalidInput, match="ONBEAT_KEYS_FILE"):
        create_app(services)


def test_the_command_makes_a_key_once_and_takes_it_away(
    keys: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONBEAT_KEYS_FILE", str(keys))
    assert run(["key", "ann", "--scope", "read"]) == 0
    made = capsys.readouterr().out.strip()
    assert len(made) >= 40
    assert run(["key", "ann"]) == 2
    assert run(["key", "ann", "--revoke"]) == 0
    assert run(["key", "ann", "--revoke"]) == 2
    assert run(["key", "an n"]) == 2
    assert run(["key", "ann", "--scope", "all"]) == 2
    monkeypatch.delenv("ONBEAT_KEYS_FILE")
    assert run(["key", "ann"]) == 2
    assert keys.read_text() == "# who may what\n"
