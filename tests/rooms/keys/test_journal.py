"""The journal: a line for each change of a job, with who made it, in Redis, for admins alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from broker.keys import JOURNAL
from contracts.encoding.wire import decode_json
from contracts.errors import BrokerFull
from contracts.settings import StackSettings
from gateway.api.jobs import EXAMPLE_JOB
from gateway.api.journal import FIELDS, MAX_LINES, Journal
from gateway.app import create_app
from gateway.services import Services
from onbeat.commands.keys import add
from onbeat.commands.keys_and_journal.journal_command import lines_of
from onbeat.commands.keys_and_journal.journal_lines import JournalLine, JournalLines
from tests.builders import job_spec
from tests.served import CLIENT, asked, services_over

REPOSITORY = Path(__file__).parents[3]
Ask = Callable[..., httpx.Response]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def services(settings: StackSettings, keys: Path) -> Iterator[Services]:
    keys.touch()
    with services_over(replace(settings, keys_file=str(keys), model_root=str(REPOSITORY))) as made:
        yield made


@pytest.fixture
def ask(services: Services) -> Ask:
    app = create_app(services)

    def ask(key: str, method: str, path: str, content: bytes | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return asked(app, method, path, headers=headers, content=content)

    return ask


def lines(answer: httpx.Response) -> list[JournalLine]:
    assert answer.status_code == 200
    return list(decode_json(answer.content, JournalLines).lines)


def test_each_change_of_a_job_has_a_line_with_its_key_job_and_address(ask: Ask, keys: Path) -> None:
    ann, boss = add(keys, "ann", "submit"), add(keys, "boss", "admin")
    spec = json.dumps(EXAMPLE_JOB).encode()
    assert ask(ann, "POST", "/v1/jobs/check", content=spec).status_code == 200
    job_id = ask(ann, "POST", "/v1/jobs", content=spec).json()["job_id"]
    assert ask(ann, "POST", "/v1/jobs", content=b"{}").status_code == 422
    assert ask(ann, "GET", f"/v1/jobs/{job_id}").status_code == 200
    assert ask(ann, "POST", f"/v1/jobs/{job_id}/cancel").status_code == 200
    assert ask(add(keys, "ben", "submit"), "DELETE", f"/v1/jobs/{job_id}").status_code == 403
    assert ask("test-key", "POST", f"/v1/jobs/{job_id}/resume").status_code == 200
    assert ask("test-key", "POST", f"/v1/jobs/{job_id}/cancel").status_code == 200
    assert ask(boss, "DELETE", f"/v1/jobs/{job_id}").status_code == 204
    told = lines(ask(boss, "GET", f"/v1/journal?job_id={job_id}"))
    assert [(line.who, line.action) for line in told] == [
        ("boss", "delete"),
        ("the operator", "cancel"),
        ("the operator", "resume"),
        ("ann", "cancel"),
        ("ann", "submit"),
    ]
    assert {(line.job_id, line.address) for line in told} == {(job_id, CLIENT[0])}
    assert sorted(line.at_s for line in told) == [line.at_s for line in reversed(told)]
    assert lines(ask(boss, "GET", "/v1/journal?limit=1")) == told[:1]
    assert lines(ask(boss, "GET", f"/v1/journal?job_id={job_id}&limit=2")) == told[:2]
    assert lines(ask(boss, "GET", "/v1/journal?job_id=job-other")) == []
    assert lines_of(JournalLines(lines=tuple(told[:1])))[0].endswith(
        f"Z  delete       {job_id:20}  boss from {CLIENT[0]}"
    )


@pytest.mark.parametrize("path", ["/v1/journal", "/v1/journal/", "/v1/journal?limit=1"])
def test_the_journal_is_read_with_the_scope_admin_alone(ask: Ask, keys: Path, path: str) -> None:
    for scope in ("read", "submit"):
        answer = ask(add(keys, scope, scope), "GET", path)
        assert (answer.status_code, answer.json()["cure"]) == (403, "use one with admin")


def test_the_journal_keeps_the_newest_lines(services: Services) -> None:
    broker = services.broker
    journal = Journal(broker)
    redis: Any = broker.redis
    with redis.pipeline() as pipeline:
        for number in range(MAX_LINES + 200):
            pipeline.xadd(JOURNAL, dict.fromkeys(FIELDS, str(number)))
        pipeline.execute()
    journal.add(who="ann", action="submit", job_id="job-1", address="")
    kept = journal.newest(2 * MAX_LINES)
    assert MAX_LINES <= len(kept) < MAX_LINES + 200
    assert (kept[0].who, kept[1].who) == ("ann", str(MAX_LINES + 199))


def test_a_change_that_stands_is_answered_though_the_journal_is_full(
    ask: Ask, services: Services, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job_id, _ = services.jobs.create(job_spec())

    def full(self: Journal, **facts: str) -> None:
        raise BrokerFull("no memory")

    monkeypatch.setattr(Journal, "add", full)
    assert ask("test-key", "POST", f"/v1/jobs/{job_id}/cancel").status_code == 200
    assert f"the journal lacks a line: cancel by the operator of {job_id}" in caplog.text
