"""The chaos campaign: when its faults fall, which processes they hit, and what its file keeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import onbeat.chaos.evidence as evidence
from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from onbeat.chaos.campaign import LEASE_S, Campaign, hardened
from onbeat.chaos.command import show_round
from onbeat.chaos.disturbed_run import DisturbedRun
from onbeat.chaos.evidence import TRAINER, strike
from onbeat.chaos.result import Baseline, CampaignResult, Fault, Hit, ResultFile, RoundResult, summed
from onbeat.stack.options import StackOptions
from tests.builders import job_spec
from tests.unit.onbeat.terminal.test_output import HOSTILE, assert_is_text, terminal


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


class StandInStack:
    """A stack whose processes are names."""

    def __init__(self, folder: Path, *, stage_workers: int = 0) -> None:
        self.options = StackOptions(run_root=folder, model_root=folder, stage_workers=stage_workers)
        self.pids: dict[str, int] = {}

    def tick(self) -> None:
        return


class StandInGateway:
    """Its first job has succeeded as it is submitted; those after it never end."""

    def __init__(self) -> None:
        self.num_jobs = 0
        self.cancelled: list[str] = []

    def submit(self, _spec: Any, *, idempotency_key: str) -> JobStatus:
        assert idempotency_key
        self.num_jobs += 1
        return replace(
            self.job(f"j{self.num_jobs}"), state=JobState.SUCCEEDED if self.num_jobs == 1 else JobState.RUNNING
        )

    def job(self, job_id: str) -> JobStatus:
        return replace(status(expected=2), job_id=job_id)

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)


def campaign_on(stack: Any, gateway: Any, **options: Any) -> Campaign:
    return Campaign(stack, gateway, job_spec(), seed=1, max_faults=1, window_s=1000.0, **options)


def test_a_round_past_its_deadline_is_stuck_and_its_job_is_cancelled(tmp_path: Path) -> None:
    gateway = StandInGateway()
    result = campaign_on(StandInStack(tmp_path), gateway, round_deadline_s=0.2).run(1, lambda _: None)
    assert [one.status for one in result.findings] == ["stuck"]
    assert gateway.cancelled == ["j2"]


@pytest.mark.parametrize("stage_workers", [0, 2])
def test_stage_workers_are_disturbed_where_the_stack_has_any(tmp_path: Path, stage_workers: int) -> None:
    stack = StandInStack(tmp_path, stage_workers=stage_workers)
    result = campaign_on(stack, StandInGateway()).run(0, lambda _: None)
    of_stages = {"kill stage worker", "kill all stage workers", "pause stage worker"}
    assert of_stages & result.faults_by_kind.keys() == (of_stages if stage_workers else set())
    assert result.stage_workers == stage_workers


def test_items_of_the_campaigns_job_are_given_on_within_a_second_and_never_given_up() -> None:
    (stage,) = hardened(job_spec(stages=[{"type": "reference"}], algorithm__kl_coefficient=0.1)).stages
    assert (stage.lease_s, stage.max_attempts) == (LEASE_S, 1000)


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
    baseline = Baseline(
        seed=7,
        schedule="delayed",
        max_policy_lag=1,
        generators=2,
        stage_workers=0,
        digest="d",
        undisturbed_s=10.0,
        window_s=6.0,
        rounds=3,
    )
    return summed(baseline, results, wall_s=60.0, kinds=kinds)


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


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def test_a_kill_is_proven_by_the_end_of_its_process_and_by_another_in_its_place(
    victim: subprocess.Popen[bytes],
) -> None:
    struck = strike("gateway", victim.pid, signal.SIGKILL, committed=3)
    assert (struck.seen, struck.hit.is_proven) == ("ended", False)
    struck.look({"gateway": victim.pid}, committed=9, has_succeeded=True)
    assert not struck.hit.is_proven, "that a job goes on says nothing of a gateway"
    struck.look({"gateway": os.getpid()}, committed=9, has_succeeded=True)
    assert (struck.healed, struck.hit.is_proven) == (f"started again as {os.getpid()}", True)


def test_a_process_that_another_fault_has_ended_is_not_there_to_be_hit(victim: subprocess.Popen[bytes]) -> None:
    strike("gateway", victim.pid, signal.SIGKILL, committed=3)
    with pytest.raises(ProcessLookupError):
        strike("gateway", victim.pid, signal.SIGKILL, committed=3)


def test_a_pause_is_proven_by_a_process_that_stood_still_and_went_on(victim: subprocess.Popen[bytes]) -> None:
    struck = strike("redis", victim.pid, signal.SIGSTOP, committed=0)
    assert struck.seen == "stopped"
    struck.look({"redis": victim.pid}, committed=5, has_succeeded=True)
    assert struck.healed == ""
    os.kill(victim.pid, signal.SIGCONT)
    while not struck.healed:
        struck.look({"redis": victim.pid}, committed=5, has_succeeded=True)
    assert struck.hit == Hit(name="redis", pid=victim.pid, signal=signal.SIGSTOP, seen="stopped", healed="went on")


@pytest.mark.parametrize(
    ("committed", "has_succeeded", "healed"),
    [(3, False, ""), (5, False, "iteration 4 was committed after it"), (3, True, "the job succeeded after it")],
)
def test_a_trainers_death_is_healed_by_what_its_job_does_after_it(
    victim: subprocess.Popen[bytes], committed: int, has_succeeded: bool, healed: str
) -> None:
    struck = strike(TRAINER, victim.pid, signal.SIGKILL, committed=3)
    struck.look({}, committed=committed, has_succeeded=has_succeeded)
    assert struck.healed == healed


def test_a_signal_that_changes_nothing_is_no_fault(
    victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "SEEN_WITHIN_S", 0.05)
    struck = strike("gateway", victim.pid, signal.SIGCONT, committed=0)
    struck.look({"gateway": os.getpid()}, committed=1, has_succeeded=True)
    assert (struck.seen, struck.healed) == ("", "")


@pytest.mark.parametrize(("late", "problems"), [(False, []), (True, ["gateway did not end within 1 s of SIGTERM"])])
def test_all_are_asked_to_end_at_once_and_one_that_is_late_is_a_problem_of_the_round(
    victim: subprocess.Popen[bytes], late: bool, problems: list[str]
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if late else ""
    program = f"import signal; {deaf}print('ready', flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        run = submitted_ago(1.0, due=[])
        run.stop([("gateway", other.pid), ("redis", victim.pid)], within_s=1.0 if late else 60.0)
        other.kill()
    assert run.problems == problems
    assert [one.seen for one in run.struck] == ["" if late else "ended", "ended"]
    assert victim.wait() == -signal.SIGTERM


PROVEN = replace(HIT, hits=(Hit(name=TRAINER, pid=71, signal=9, seen="ended", healed="the job succeeded after it"),))


@pytest.mark.parametrize(
    ("runs", "repeats", "problems"),
    [
        ([(PROVEN, MISSED)], 0, ()),
        ([(), (MISSED,), (PROVEN,)], 2, ()),
        ([(), (MISSED,), ()], 2, ("no fault came",)),
        (
            [(), (), (MISSED,)],
            2,
            ("no fault was proven to have happened and to be healed, of pause trainer (70 for 1.0 s)",),
        ),
    ],
)
def test_a_calm_round_is_repeated_and_then_a_finding(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    runs: list[tuple[Fault, ...]],
    repeats: int,
    problems: tuple[str, ...],
) -> None:
    left = list(runs)
    monkeypatch.setattr(Campaign, "_run_round", lambda *_, **__: round_result(0, left.pop(0)))
    result = campaign_on(StandInStack(tmp_path), StandInGateway()).run(1, lambda _: None)
    (only,) = result.results
    assert (only.repeats, only.problems, left) == (repeats, problems, [])
    assert result.passed == (not problems)
    assert result.faults_proven == sum(fault.is_proven for fault in only.faults)


ROUND = RoundResult(
    number=1,
    job_id="job-1",
    status="failed",
    from_submission=True,
    opened_s=None,
    faults=(),
    wall_s=1.0,
    rewinds=0,
    rejected={},
    problems=(HOSTILE,),
)


def test_what_a_job_wrote_is_text() -> None:
    console, shown = terminal()
    show_round(console, ROUND)
    assert_is_text(shown.getvalue())
