"""`onbeat plan` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.run_folder import RunFolder
from onbeat import cli
from onbeat.client.spec_file import load_spec
from tests.rooms.planning.timelines import JOB, write_synchronous_run

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
SCHEDULES = ("periodic", "synchronous", "colocated", "delayed", "bounded")


@pytest.fixture
def finished(tmp_path: Path) -> RunFolder:
    """A synchronous run of the demo's job, of ten iterations."""
    return write_synchronous_run(tmp_path, load_spec(DEMO, ["iterations=10", "schedule=synchronous"]))


def test_the_command_prints_one_object_with_a_row_for_each_schedule_and_the_measured_times(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--from", JOB, "--run-dir", str(finished.path.parent), "--generators", "1..2", "--json"]
    assert cli.run(["plan", str(DEMO), *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(row["schedule"], row["generators"]) for row in plan["predictions"]] == [
        (schedule, number) for number in (1, 2) for schedule in SCHEDULES
    ]
    assert plan["measured"]["job_id"] == JOB
    synchronous = next(row for row in plan["predictions"] if row["schedule"] == "synchronous")
    assert synchronous["iteration_s"] == pytest.approx(plan["measured"]["iteration_s"], rel=0.01)


def test_the_command_shows_the_rows_and_the_times_they_are_made_of(
    finished: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["plan", str(DEMO), "--from", str(finished.path), "--set", "name=a [bold]job"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"a [bold]job: measured in {JOB} (synchronous), 8 iterations")
    assert all(schedule in text for schedule in SCHEDULES)
    assert "A batch is sampled in 1.25 s, scored in 0.5 s and trained in 2.08 s" in text
    # Four passes of 2.08 s and a step of 1.44 s are longer than four batches: 400 tokens in 9.75 s.
    assert "delayed 1 9.75 41 51% 100%" in text
    assert "colocated 1 ≥ " in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "Missing option '--from'"),
        (["--from", "nowhere"], "nowhere"),
        (["--from", "JOB", "--generators", "0"], "--generators: `0` is not in order"),
        (["--from", "JOB", "--generators", "4..2"], "is not in order"),
        (["--from", "JOB", "--generators", "1..99"], "99 numbers"),
        (["--from", "JOB", "--generators", "many"], "is neither N nor N..M"),
        (["--from", "JOB", "--set", "rollout.group_size=4"], "rollout.group_size: is 4 in the spec and 8 in"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(
    finished: RunFolder, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    typed = [str(finished.path) if flag == "JOB" else flag for flag in flags]
    assert cli.run(["plan", str(DEMO), *typed, "--run-dir", str(finished.path.parent)]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1
