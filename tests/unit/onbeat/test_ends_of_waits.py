"""The end of a wait, and job ids for the shell."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from onbeat.cli import run
from onbeat.commands.options import job_ids
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway, fake_gateway


def test_submit_and_wait_prints_the_digest_at_its_end(
    gateway: FakeGateway, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["watch", JOB]) == 0
    digest = gateway.status().weights_digest
    assert capsys.readouterr().out.splitlines()[-1] == f"{JOB}  succeeded   version 2   weights digest {digest}"


def test_job_ids_are_completed_from_the_gateway_or_not_at_all(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert job_ids("job-") == [(JOB, "succeeded")]
    assert job_ids("other") == []
    monkeypatch.setenv("ONBEAT_API_KEY", "wrong")
    assert job_ids("job-") == []


@pytest.mark.parametrize("hostile", [{"job_id": "job-$(id)"}, {"job_id": 7}, {"state": "`id`"}])
def test_a_shell_is_given_nothing_that_it_could_run(
    hostile: dict[str, object], gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = msgspec.to_builtins(replace(gateway.status(), name="'; id; '")) | hostile
    monkeypatch.setattr(type(gateway), "status", lambda _: status)
    assert job_ids("") == []


def test_a_gateway_that_hangs_holds_no_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gateway() as server:
        monkeypatch.setenv("ONBEAT_GATEWAY_URL", server.url)
        hang = threading.Event()
        monkeypatch.setattr(type(server), "status", lambda _: hang.wait(60))
        monkeypatch.setenv("ONBEAT_API_KEY", KEY)
        assert job_ids("job-") == []
        hang.set()
