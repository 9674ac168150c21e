"""The job of the fault tests, and what each of them asks of its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.errors import Unavailable
from contracts.jobs import JobState
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from tests import until as asked
from tests.building.specs import trained_job
from tests.pipeline import Pipeline, wait_for_exit
from tests.sequential_execution import digests_of_versions

DEADLINE_S = 300.0
"""A deadline that only a hung process can reach."""
ITERATIONS = 8
IS_LONG = bool(os.environ.get("CHAOS_LONG"))
"""`make chaos` sets it."""
long_variant = pytest.mark.long_variant
"""Marks a case of a promise that another test of `make test` holds: tests/conftest.py leaves it to `make chaos`."""


short_job = trained_job.but(iterations=ITERATIONS, timeouts__generator_lease_s=1.0, rollout__max_attempts=100)
"""Jobs of eight iterations, with leases so short that what is dead is replaced in a second."""


def lose_last_writes(pipeline: Pipeline, job_id: str) -> None:
    """Redis comes back without the job's fourth iteration."""
    until(committed(pipeline, job_id, 3), "three iterations")
    assert pipeline.broker.durability.persisted()
    (file,) = (pipeline.redis.folder / "appendonlydir").glob("*.incr.aof")
    mark = file.stat().st_size
    until(committed(pipeline, job_id, 4), "writes to lose")
    pipeline.redis.kill()
    os.truncate(file, mark)
    pipeline.redis.restart()


LAG: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 2, "algorithm__correction": "tis"}
"""What makes a short job one of three open iterations."""

STAGED: dict[str, Any] = {
    "iterations": 6,
    "algorithm__kl_coefficient": 0.01,
    "algorithm__distillation_coefficient": 0.05,
    "stages": [
        {"type": "reference", "lease_s": 1.0, "max_attempts": 100},
        {"type": "teacher", "model": "configs/models/two-digit-addition", "lease_s": 1.0, "max_attempts": 100},
    ],
}
"""What makes a short job one whose batches pass two stages, whose workers are replaced in a second as well."""


def sequential_digest(pipeline: Pipeline, spec: JobSpec, folder: Path) -> str:
    """The digest of the job's final weights without any of the stack: also what a lag makes has an oracle."""
    return digests_of_versions(spec, pipeline.settings, folder)[-1]


def undisturbed_digest(pipeline: Pipeline, spec: JobSpec) -> str:
    """The digest of the job's final weights, synchronous and in one go; a generator runs already."""
    return pipeline.final_digest(pipeline.train(replace(spec, schedule="synchronous")))


def assert_undisturbed(pipeline: Pipeline, job_id: str, digest: str) -> None:
    """Asserts that the job succeeded, with the undisturbed run's digest and a chain without a gap."""
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.final_digest(job_id) == digest
    assert pipeline.verdict(job_id).gaps == ()


def until(condition: Callable[[], bool], what: str) -> None:
    """Asks until it is true; while Redis is away it counts as false."""
    asked.until(condition, what, deadline_s=DEADLINE_S, away=(Unavailable,))


def committed(pipeline: Pipeline, job_id: str, count: int) -> Callable[[], bool]:
    """Whether so many iterations are in the audit chain."""
    return lambda: len(pipeline.jobs.audit(job_id)) >= count


@contextmanager
def running(pipeline: Pipeline, name: str, *arguments: str, **settings: Any) -> Iterator[ChildProcess]:
    """A process that is stopped at the end of the block, if it still lives."""
    child = pipeline.start(name, *arguments, **settings)
    try:
        yield child
    finally:
        child.stop(grace_s=10.0)


def succeed(trainer: ChildProcess) -> None:
    """Waits for the end of the job, which must be a success."""
    wait_for_exit(trainer, DEADLINE_S)
    assert trainer.exit_code == 0, trainer.tail()
