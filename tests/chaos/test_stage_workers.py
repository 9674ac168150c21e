"""Stage workers die, sleep past their leases, come late: no row is lost, none counts twice, and no bit changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from broker.keys import STAGE_BAND
from onbeat.base.process.child_process import ChildProcess
from onbeat.base.process.crash_points import CRASH_POINTS
from tests.chaos.short_job import (
    DEADLINE_S,
    STAGED,
    assert_undisturbed,
    long_variant,
    lose_last_writes,
    running,
    short_job,
    succeed,
    undisturbed_digest,
    until,
)
from tests.forked import STAGE_WORKER
from tests.pipeline import Pipeline, wait_for_exit

NUM_GENERATORS = 1

POINTS = [name for name in CRASH_POINTS if name.startswith("stage.")]
TRAINER_POINTS = ["consumer.after_micro_batch", "consumer.after_step", "consumer.after_commit"]
JOB = short_job(**STAGED)
WINDOW = short_job(**STAGED, schedule="delayed", max_policy_lag=1, algorithm__correction="none")


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """What the job makes with one stage worker that nothing disturbs."""
    with running(pipeline, f"{STAGE_WORKER}-oracle"):
        return undisturbed_digest(pipeline, JOB)


def counted(pipeline: Pipeline, job_id: str, name: str) -> int:
    """How often this was counted, over all stages of the job."""
    counters: Any = pipeline.broker.redis.hgetall(pipeline.broker.job_keys(job_id).counters)
    return sum(int(number) for key, number in counters.items() if key.decode().startswith(f"{name}:"))


def reclaimed(pipeline: Pipeline, job_id: str, count: int = 1) -> Callable[[], bool]:
    """Whether other stage workers have taken over so many items."""
    return lambda: counted(pipeline, job_id, "stage_reclaimed") >= count


def held(pipeline: Pipeline, job_id: str) -> bool:
    """Whether an item is under a lease."""
    slot = pipeline.broker.job_keys(job_id).slot_of(0)
    work: Any = pipeline.broker.redis.zrangebyscore(slot.work, STAGE_BAND, "+inf", withscores=True)
    return any(score % STAGE_BAND for _, score in work)


def test_every_place_where_a_stage_worker_can_die_is_healed_by_another(pipeline: Pipeline, oracle: str) -> None:
    job_id, _ = pipeline.jobs.create(JOB)
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        for point in POINTS:
            worker = pipeline.start(f"{STAGE_WORKER}-{point}", crash_at=f"{point}:2")
            wait_for_exit(worker)
            assert worker.exit_code == -signal.SIGKILL, f"{point} was never reached:\n{worker.tail()}"
        with running(pipeline, f"{STAGE_WORKER}-survivor"):
            succeed(trainer)
    assert reclaimed(pipeline, job_id)()
    assert_undisturbed(pipeline, job_id, oracle)


def test_a_stage_worker_that_slept_past_its_lease_puts_late_and_changes_nothing(
    pipeline: Pipeline, oracle: str
) -> None:
    job_id, _ = pipeline.jobs.create(JOB)
    with (
        running(pipeline, f"{STAGE_WORKER}-sleeper") as sleeper,
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        sleeps_while(sleeper, lambda: held(pipeline, job_id))
        with running(pipeline, f"{STAGE_WORKER}-second"):
            until(reclaimed(pipeline, job_id), "a second stage worker to take over")
            os.kill(sleeper.pid or 0, signal.SIGCONT)
            succeed(trainer)
    assert_undisturbed(pipeline, job_id, oracle)


def sleeps_while(worker: ChildProcess, is_at_work: Callable[[], bool]) -> None:
    """Stops the process in the middle of an item: it is woken where it slept between two."""
    while True:
        until(is_at_work, "an item in work")
        os.kill(worker.pid or 0, signal.SIGSTOP)
        if is_at_work():
            return
        os.kill(worker.pid or 0, signal.SIGCONT)


@long_variant
@pytest.mark.parametrize("job", [JOB, WINDOW], ids=["periodic", "delayed"])
def test_a_trainer_that_is_replaced_between_columns_and_commit_takes_the_same_columns(
    pipeline: Pipeline, oracle: str, job: Any
) -> None:
    with running(pipeline, f"{STAGE_WORKER}-steady"):
        if job is WINDOW:
            oracle = pipeline.final_digest(pipeline.train(job))
        job_id, _ = pipeline.jobs.create(job)
        for point in TRAINER_POINTS:
            exit_code = pipeline.train_until_death(job_id, crash_at=f"{point}:2")
            assert exit_code == -signal.SIGKILL, f"{point} was never reached: exit code {exit_code}"
        pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, oracle)


@long_variant
def test_a_redis_that_forgets_columns_loses_no_run(pipeline: Pipeline, oracle: str) -> None:
    """It forgets a commit and the columns after it, while the trainer that was given them lives."""
    job_id, _ = pipeline.jobs.create(JOB)
    with (
        running(pipeline, f"{STAGE_WORKER}-1"),
        running(pipeline, f"{STAGE_WORKER}-2"),
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        lose_last_writes(pipeline, job_id)
        if wait_for_exit(trainer, DEADLINE_S) != 0:
            pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, oracle)
