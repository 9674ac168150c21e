"""Keys with scopes: what each may do, rotation under a running gateway, a log of who changed what, no key in a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from gateway.app import create_app
from onbeat.cli import run
from onbeat.http_service.access import SCOPES
from onbeat_extras.keys.command import add, revoked
from tests.builders import job_spec
from tests.served import asked, services_over


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may what\n")
    return path


@pytest.fixture
def app(settings: StackSettings, keys: Path) -> Iterator[FastAPI]:
    with services_over(replace(settings, keys_file=str(keys))) as services:
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
        ("DELETE", NONE, "admin"),
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
    assert "the keys stay as they were: ONBEAT_KEYS_FILE" in caplog.text


def test_the_log_says_who_changed_what_and_nothing_of_who_looked(
    app: FastAPI, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="onbeat.http_service.access")
    key = add(keys, "ann", "admin")
    ask(app, key)
    ask(app, key, "DELETE", NONE)
    ask(app, "test-key", "POST", f"{NONE}/cancel")
    lines = [record.getMessage() for record in caplog.records if record.name == "onbeat.http_service.access"]
    assert lines == [f"ann: DELETE {NONE} 404 ", f"the operator: POST {NONE}/cancel 404 "]
    assert key not in caplog.text


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
