"""`onbeat jobs` with its filters."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from contracts.jobs import JobState
from onbeat.cli import run
from onbeat.commands.job_list import job_table, show_jobs
from tests.e2e.stand_in_gateway import JOB, FakeGateway
from tests.unit.onbeat.terminal.test_output import STATUS, assert_is_text, terminal


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
    narrow = drawn(job_table([long], width=80, now_s=160.0))
    assert "n" * 12 in narrow[1], "a job is told by its name, too"
    assert all(len(line.rstrip()) <= 80 for line in narrow)
    assert "60 s ago" in narrow[1]
    assert all(
        drawn(job_table([long], width=width, now_s=160.0), width=width)[1].startswith(f"{long.job_id} ")
        for width in (40, 60, 80)
    )
    in_a_pipe = io.StringIO()
    show_jobs([long], Console(file=in_a_pipe, width=80), now_s=160.0)
    line = in_a_pipe.getvalue().splitlines()[1]
    assert line.split()[0] == long.job_id
    assert f" {long.name} " in line


def test_what_others_wrote_is_text_in_the_list() -> None:
    console, shown = terminal()
    show_jobs([STATUS], console, now_s=1.0)
    assert_is_text(shown.getvalue())
