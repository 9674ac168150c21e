"""Kills, hangs or cuts off Redis' primary, and takes the seconds until the next commit: `healing failover`."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from tests.builders import job_spec
from tests.hosts.network import Network
from tests.pipeline import HELD, Pipeline, wait_for_exit
from tests.redundant_redis import SHIPPED_MS, RedundantRedis

EXPECTED = (
    "Before the first run: killed, hung and cut off, 3 to 4.5 s, none above 5 (1.75 s until two sentinels give it up, "
    "one for the promotion, up to one until a call looks where the primary is and a batch is published). With the "
    "trainer: its lease of 2 s and the promotion at once, and the start of a trainer, 4 to 7 s."
)
WITH_TRAINER = "cut off with the trainer"
FAULTS = ("killed", "hung", "cut off", WITH_TRAINER)
WARM_UP = 4
DEADLINE_S = 120.0


def spec_of(iterations: int) -> JobSpec:
    return job_spec(
        iterations=iterations,
        model__path="configs/models/two-digit-addition",
        optimizer__learning_rate=1e-3,
        schedule="delayed",
        max_policy_lag=1,
        algorithm__correction="tis",
        timeouts__trainer_lease_s=2.0,
        timeouts__generator_lease_s=2.0,
        rollout__max_attempts=100,
    )


class Run:
    """A job, and the moments of its commits as this process saw them. A rewind is no commit."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.job_id, _ = pipeline.jobs.create(spec_of(200))
        self.seen_s: list[float] = []

    def until_commits(self, count: int) -> None:
        waiting = Waiting(f"{count} commits", deadline_s=DEADLINE_S)
        while len(self.seen_s) < count:
            records = self._pipeline.jobs.audit(self.job_id)
            self.seen_s += [time.monotonic()] * (sum(record.kind == "commit" for record in records) - len(self.seen_s))
            waiting.poke()
            time.sleep(0.005)

    @property
    def usual_s(self) -> float:
        pairs = zip(self.seen_s[1:], self.seen_s[2:], strict=False)
        return statistics.median(later - earlier for earlier, later in pairs)


def stands_still_s(fault: str, folder: Path) -> tuple[float, dict[str, float]]:
    """Returns the seconds without a commit, and marks: for a trainer that was cut off, too, the seconds from the fault
    until the next trainer had the job."""
    with ExitStack() as stack:
        network = stack.enter_context(Network()) if "cut off" in fault else None
        where: dict[str, Any] = {"hosts": network.hosts, "entering": network.entering} if network else {}
        redundant = RedundantRedis(folder / "redis", down_after_ms=SHIPPED_MS, **where)
        pipeline = stack.enter_context(Pipeline(folder, redundant))
        pipeline.start_generators(2)
        run = Run(pipeline)
        there = network.entering(network.hosts[0]) if network and fault == WITH_TRAINER else ()
        trainer = pipeline.start(f"consumer-{run.job_id}", run.job_id, entering=there)
        run.until_commits(WARM_UP)
        fault_s = time.monotonic()
        marks: dict[str, float] = {}
        primary = redundant.primary()
        assert primary.child.pid is not None
        if network is not None:
            network.cut_off(network.hosts[0])
            if there:
                take_over(pipeline, run.job_id)
                marks["held"] = round(time.monotonic() - fault_s, 2)
        else:
            os.kill(primary.child.pid, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        done = len(run.seen_s)
        run.until_commits(done + 1)
        still_s = run.seen_s[done] - fault_s - run.usual_s
        trainer.kill()
        return still_s, marks


def take_over(pipeline: Pipeline, job_id: str) -> None:
    """Starts trainers on this side as a consumer does, until one holds the job."""
    number = 0
    while True:
        number += 1
        trainer = pipeline.start(f"consumer-{job_id}-{number}", job_id)
        waiting = Waiting("a trainer to hold the job or end", deadline_s=DEADLINE_S)
        while trainer.is_running and "holds job" not in trainer.tail():
            waiting.poke()
            time.sleep(0.02)
        if trainer.is_running or wait_for_exit(trainer) != HELD:
            return


def measured(fault: str, repeats: int) -> tuple[list[float], list[dict[str, float]]]:
    """Returns the seconds without a commit and the marks of each repeat."""
    stills_s: list[float] = []
    marks: list[dict[str, float]] = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as folder:
            still_s, marked = stands_still_s(fault, Path(folder))
        stills_s.append(round(still_s, 2))
        marks.append(marked)
        print(fault, stills_s[-1], marked, flush=True)
    return stills_s, marks


def run(faults: Sequence[str], *, repeats: int) -> dict[str, Any]:
    """Has each fault `repeats` times, each in a stack of its own; returns the result."""
    each = {fault: measured(fault, repeats) for fault in faults}
    medians_s = {fault: statistics.median(seconds) for fault, (seconds, _) in each.items()}
    print(medians_s)
    return {
        "expected": EXPECTED,
        "medians_s": medians_s,
        "seconds": {fault: seconds for fault, (seconds, _) in each.items()},
        "marks_s": {fault: marks for fault, (_, marks) in each.items() if any(marks)},
    }
