"""`jobs` with its filters, and job ids for the shell."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from contracts.jobs import JobState
from onbeat.cli import run
from onbeat.commands.options import job_ids
from onbeat.terminal.job_view import job_table, show_jobs
from tests.e2e.stand_in_gateway import JOB, KEY, FakeGateway, fake_gateway


def drawn(what: object, *, width: int = 80) -> list[str]:
    shown = io.StringIO()
    Console(file=shown, width=width, height=24).print(what)
    return shown.getvalue().splitlines()


def test_jobs_are_asked_for_by_state_and_name_and_shown_with_times_and_reasons(
    gateway: FakeGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.final = JobState.FAILED
    assert run(["jobs", "--state", "failed", "--state", "queued", "--name", "sums", "--limit", "5"]) == 0
    assert gateway.listings == [{"state": ["failed", "queued"], "name": ["sums"], "limit": ["5"]}]
    text = capsys.readouterr().out
    assert f"{JOB}  failed: the loss is not finite" in text
    assert "days ago" in text
    assert run(["jobs", "--state", "asleep"]) == 2
    long = replace(gateway.status(), job_id="job-0123456789ab", name="n" * 90, iterations_committed=150)
    narrow = drawn(job_table([long], is_wide=False, now_s=160.0))
    assert all(len(line.rstrip()) <= 80 for line in narrow)
    assert "60 s ago" in narrow[1]
    assert all(
        drawn(job_table([long], is_wide=False, now_s=160.0), width=width)[1].startswith(f"{long.job_id} ")
        for width in (40, 60, 80)
    )
    in_a_pipe = io.StringIO()
    show_jobs([long], Console(file=in_a_pipe, width=80), now_s=160.0)
    line = in_a_pipe.getvalue().splitlines()[1]
    assert line.split()[0] == long.job_id
    assert f" {long.name} " in line


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
