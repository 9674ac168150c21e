"""The chaos campaign: when its faults fall, which processes they hit, and what its file keeps."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from onbeat.chaos.campaign import DisturbedRun
from onbeat.chaos.result import CampaignResult, Fault, ResultFile, RoundResult, summed


def status(*, expected: int = 0, committed: int = 0) -> JobStatus:
    return JobStatus(
        job_id="j",
        name="j",
        state=JobState.RUNNING,
        schedule="periodic",
        iterations=4,
        iterations_committed=committed,
        batches_expected=expected,
        created_s=0.0,
    )


def submitted_ago(seconds: float, **fields: Any) -> DisturbedRun:
    return DisturbedRun(started_s=time.monotonic() - seconds, **fields)


def test_faults_are_not_due_before_the_first_iteration_is_open() -> None:
    run = submitted_ago(100.0, due=[(0.0, "kill redis")])
    run.see(status(), [])
    assert (run.opened_s, run.is_due) == (None, False)
    run.see(status(expected=2), [])
    assert run.opened_s is not None
    assert run.is_due


def test_their_times_count_from_the_first_open_iteration_or_from_the_submission() -> None:
    late = [(50.0, "kill redis")]
    opened, submitted = submitted_ago(100.0, due=late), submitted_ago(100.0, due=late, from_submission=True)
    for run in (opened, submitted):
        run.see(status(expected=2), [])
    assert (opened.is_due, submitted.is_due) == (False, True)


def test_a_trainer_is_at_work_once_the_job_has_moved_under_it() -> None:
    run = submitted_ago(1.0, due=[])
    run.see(status(expected=2, committed=3), [71])
    assert not run.is_at_work(71)
    run.see(status(expected=2, committed=2), [71, 72])  # it rewound
    assert (run.is_at_work(71), run.is_at_work(72), run.is_at_work(73)) == (True, False, False)


def test_a_fault_that_found_nobody_comes_again_later() -> None:
    run = submitted_ago(10.0, due=[(60.0, "kill redis")], from_submission=True)
    run.put_off("kill trainer", 2.0)
    assert [kind for _, kind in run.due] == ["kill redis", "kill trainer"]
    assert run.due[-1][0] == pytest.approx(12.0, abs=0.5)


def round_result(number: int, faults: tuple[Fault, ...], **changes: Any) -> RoundResult:
    fields: dict[str, Any] = {
        "number": number,
        "job_id": f"job-{number}",
        "status": "succeeded",
        "from_submission": False,
        "opened_s": 4.0,
        "faults": faults,
        "wall_s": 20.0,
        "rewinds": 1,
        "rejected": {"duplicate": 2},
        "problems": (),
    }
    return RoundResult(**(fields | changes))


def campaign(*results: RoundResult) -> CampaignResult:
    kinds = ("kill trainer", "kill redis", "pause trainer")
    return summed(
        results,
        seed=7,
        schedule="delayed",
        max_policy_lag=1,
        generators=2,
        digest="d",
        undisturbed_s=10.0,
        window_s=6.0,
        rounds=3,
        wall_s=60.0,
        kinds=kinds,
    )


HIT = Fault(at_s=5.0, kind="kill trainer", target="71", at_work=True)
MISSED = Fault(at_s=2.0, kind="pause trainer", target="70 for 1.0 s")
REDIS = Fault(at_s=6.0, kind="kill redis", target="redis")


def test_a_campaign_adds_up_its_rounds_and_names_the_findings() -> None:
    lost = round_result(1, (MISSED, REDIS), rejected={"stale": 1}, rewinds=0, problems=("digest e",))
    result = campaign(round_result(0, (HIT, REDIS)), lost)
    assert (result.rounds, result.rounds_run, result.faults, result.passed) == (3, 2, 4, False)
    assert result.faults_by_kind == {"kill trainer": 1, "kill redis": 2, "pause trainer": 1}
    assert (result.trainers_hit, result.trainers_hit_at_work) == (2, 1)
    assert (result.rewinds, result.rejected) == (1, {"duplicate": 2, "stale": 1})
    assert result.findings == (lost,)


def test_its_file_is_whole_after_every_round(tmp_path: Path) -> None:
    path = tmp_path / "results" / "chaos.json"
    file = ResultFile(path, {"commit": "abc", "date": "today", "machine": {"cores": 2}})
    rounds = [round_result(0, (HIT,)), round_result(1, (REDIS,))]
    for number in range(3):
        file.write(campaign(*rounds[:number]))
        kept = json.loads(path.read_text())
        assert (kept["seed"], kept["digest"], kept["rounds"], kept["rounds_run"]) == (7, "d", 3, number)
        assert [one["job_id"] for one in kept["results"]] == ["job-0", "job-1"][:number]
    assert (kept["benchmark"], kept["commit"], kept["machine"]) == ("chaos", "abc", {"cores": 2})
    assert [one.name for one in path.parent.iterdir()] == ["chaos.json"]


def test_a_file_that_cannot_be_written_is_refused_before_the_campaign(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InvalidInput, match="--out"):
        ResultFile(tmp_path / "taken" / "chaos.json", {})
