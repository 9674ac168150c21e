"""The programs of examples/, killed at random times: processes of a person's own lose nothing and change no bit either.

What runs under a lag is trained by our own trainer: an external one trains the batches of its own version alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from broker.connection.roles import GENERATOR, STAGE, TRAINER
from contracts.jobs import JobState
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.waiting import Waiting
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, long_variant, running, short_job
from tests.pipeline import REPOSITORY, Pipeline, wait_for_exit

EXAMPLES = REPOSITORY / "examples"
GENERATES = Path(__file__).parent / "stand_ins" / "reproducible_generator.py"
ITERATIONS = 10
KILLS = 3
"""Each program is killed so often."""
PACE_S = 1.0
"""A kill comes so long, at most, after the commit that it waits for."""
PROGRAMS = {
    "trainer": (EXAMPLES / "trainer.py", TRAINER),
    "stage": (EXAMPLES / "stage.py", STAGE),
    "generator": (GENERATES, GENERATOR),
    "generator_2": (GENERATES, GENERATOR),
}
VARIETY: dict[str, Any] = {
    "type": "external",
    "name": "variety",
    "inputs": ["text"],
    "outputs": [{"name": "variety", "type": "float32"}],
    "reward_column": "variety",
    "weight": 0.1,
    "lease_s": 1.0,
    "max_attempts": 100,
}


job = short_job.but(iterations=ITERATIONS, stages=[VARIETY])


OWN = job(
    trainer={"external": True},
    optimizer={},
    rollout__batches_per_iteration=1,
    rollout__prompts_per_batch=4,
    timeouts__trainer_lease_s=1.0,
)
"""Its trainer sums what it is given in the order in which it comes: one micro-batch of an iteration has one order."""
LAGGING = job(schedule="delayed", max_policy_lag=1, algorithm__correction="none")


@dataclass
class OwnProcesses:
    """Keeps programs running while their job does: each that ends is started again, as its owner would."""

    pipeline: Pipeline
    job_id: str
    names: Sequence[str]
    due: list[tuple[float, str]] = field(default_factory=list)
    """(commits that it waits for, and the share of PACE_S after them; program) of each kill, the next last."""
    killed: list[str] = field(default_factory=list)
    running: dict[str, ChildProcess] = field(default_factory=dict)

    def run(self) -> None:
        """Returns at the end of the job."""
        waiting = Waiting(f"the end of {self.job_id}", deadline_s=3 * DEADLINE_S)
        committed, since_s = 0, time.monotonic()
        try:
            while not self.pipeline.jobs.state(self.job_id).is_final:
                now = len(self.pipeline.jobs.audit(self.job_id))
                if now != committed:
                    committed, since_s = now, time.monotonic()
                self._keep()
                while self.due and self.due[-1][0] <= committed + min(0.99, (time.monotonic() - since_s) / PACE_S):
                    self._kill(self.due.pop()[1])
                waiting.poke()
                time.sleep(0.02)
            for child in self.running.values():
                wait_for_exit(child)
        finally:
            for child in self.running.values():
                child.stop(grace_s=0.0)

    def _keep(self) -> None:
        for name in self.names:
            child = self.running.get(name)
            if child is None or child.exit_code is not None:
                program, role = PROGRAMS[name]
                number = len(self.pipeline.children)
                self.running[name] = self.pipeline.start_program(f"{name}-{number}", program, self.job_id, role=role)

    def _kill(self, name: str) -> None:
        self.running[name].kill()
        self.killed.append(name)


def trained(pipeline: Pipeline, spec: JobSpec, names: Sequence[str], *, seed: int | None = None) -> str:
    """Runs the job with these programs to its success; with a seed they are killed at times that it draws."""
    job_id, _ = pipeline.jobs.create(spec)
    own = OwnProcesses(pipeline, job_id, names)
    if seed is not None:
        draw = random.Random(seed)
        own.due = sorted(
            ((draw.uniform(0, ITERATIONS - 1), name) for name in names for _ in range(KILLS)), reverse=True
        )
    if "trainer" in names:
        own.run()
    else:
        with running(pipeline, f"consumer-{job_id}", job_id):
            own.run()
    if seed is not None:
        assert sorted(own.killed) == sorted(list(names) * KILLS)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED, pipeline.jobs.fields(job_id)["reason"]
    return job_id


@long_variant
@pytest.mark.parametrize("seed", [1, 2])
def test_a_trainer_a_generator_and_a_stage_of_ones_own_are_killed_and_no_bit_changes(
    pipeline: Pipeline, seed: int
) -> None:
    calm = trained(pipeline, OWN, ["trainer", "stage", "generator"])
    disturbed = trained(pipeline, OWN, ["trainer", "stage", "generator"], seed=seed)
    assert_undisturbed(pipeline, disturbed, pipeline.final_digest(calm))


@long_variant
def test_two_generators_of_ones_own_that_are_killed_under_a_lag_sample_what_one_would(pipeline: Pipeline) -> None:
    calm = trained(pipeline, LAGGING, ["stage", "generator"])
    disturbed = trained(pipeline, LAGGING, ["stage", "generator", "generator_2"], seed=3)
    assert_undisturbed(pipeline, disturbed, pipeline.final_digest(calm))
    last = {record.iteration: record for record in pipeline.jobs.audit(disturbed) if record.kind == "commit"}
    samplers = [[one.policy_version for one in last[number].sampled or ()] for number in range(ITERATIONS)]
    assert samplers == [[], *([number - 1] for number in range(1, ITERATIONS))]
