"""Redis away, killed, full, or cut off in the middle of an answer: the run waits, goes on, and ends the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.script_texts import function_name
from broker.monitor import job_status
from contracts.errors import BrokerFull
from contracts.jobs import JobState
from contracts.settings import StackSettings
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.short_job import (
    DEADLINE_S,
    IS_LONG,
    LAG,
    STAGED,
    assert_undisturbed,
    committed,
    long_variant,
    lose_last_writes,
    running,
    sequential_digest,
    short_job,
    succeed,
    undisturbed_digest,
    until,
)
from tests.forked import STAGE_WORKER
from tests.pipeline import Pipeline, wait_for_exit

NUM_GENERATORS = 1

OUTAGE_S = 20.0 if IS_LONG else 3.0
"""An outage that outlasts the leases."""
HANG_S = 50.0 if IS_LONG else 7.0
"""A hang that outlasts the leases and one call of a generator; the long one outlasts what any process waits."""
TRANSITIONS = (
    "acquire_trainer",
    "renew_trainer",
    "publish_weights",
    "open_iteration",
    "claim_prompt",
    "renew",
    "publish_batch",
    "claim_rollouts",
    "commit_iteration",
    "set_state",
)
OF_STAGES = (*TRANSITIONS, "claim_rows", "put_rows")


class CutPipeline(Pipeline):
    """All of its processes reach Redis through the proxy."""

    proxy: CuttingProxy | None = None

    @property
    def settings(self) -> StackSettings:
        settings = super().settings
        if self.proxy is None:
            self.proxy = CuttingProxy(self.redis.socket, every=10)
            self.proxy.__enter__()
        return replace(settings, redis_url=settings.redis_url.replace(self.redis.socket.name, self.proxy.path.name))

    def close(self) -> None:
        super().close()
        if self.proxy is not None:
            self.proxy.__exit__()


def test_processes_outlast_a_redis_that_refuses_connections(pipeline: Pipeline, undisturbed: str) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    generator = pipeline.children["producer-1"].pid
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        pipeline.redis.stop()
        time.sleep(OUTAGE_S)
        pipeline.redis.restart()
        succeed(trainer)
    assert pipeline.children["producer-1"].pid == generator
    assert pipeline.children["producer-1"].is_running
    assert_undisturbed(pipeline, job_id, undisturbed)


def start_again(pipeline: Pipeline) -> None:
    """Starts the generator again where it gave up, as its supervisor does: the long hang outlasts what it waits."""
    if not pipeline.children["producer-1"].is_running:
        pipeline.start_generators(1)


def test_a_redis_that_hangs_for_longer_than_its_calls_last_loses_no_run(pipeline: Pipeline, undisturbed: str) -> None:
    """A stopped server takes connections and answers nothing; what gives up is started again, as a consumer does."""
    job_id, _ = pipeline.jobs.create(short_job())
    redis = pipeline.redis.child.pid
    assert redis is not None
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        os.kill(redis, signal.SIGSTOP)
        time.sleep(HANG_S)
        os.kill(redis, signal.SIGCONT)
        start_again(pipeline)
        if wait_for_exit(trainer, DEADLINE_S) != 0:
            pipeline.train_to_the_end(job_id)
    assert pipeline.children["producer-1"].is_running
    assert_undisturbed(pipeline, job_id, undisturbed)


def test_answers_that_a_black_hole_swallows_lose_no_run(tmp_path: Path, undisturbed: str) -> None:
    """Connections stand, and nothing comes back over them any more: others are opened."""
    pipeline = CutPipeline(tmp_path)
    with pipeline:
        pipeline.start_generators(1)
        job_id, _ = pipeline.jobs.create(short_job())
        assert pipeline.proxy is not None
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            until(committed(pipeline, job_id, 2), "two iterations")
            pipeline.proxy.swallow()
            time.sleep(HANG_S)
            pipeline.proxy.answer()
            start_again(pipeline)
            if wait_for_exit(trainer, DEADLINE_S) != 0:
                pipeline.train_to_the_end(job_id)
        assert_undisturbed(pipeline, job_id, undisturbed)


def test_a_killed_redis_that_comes_back_with_its_file_loses_no_run(pipeline: Pipeline, undisturbed: str) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        for appendfsync, count in (("everysec", 1), ("always", 3), ("everysec", 5)):
            pipeline.broker.redis.config_set("appendfsync", appendfsync)
            until(committed(pipeline, job_id, count), f"{count} iterations")
            pipeline.redis.kill()
            pipeline.redis.restart()
        succeed(trainer)
    assert_undisturbed(pipeline, job_id, undisturbed)


@pytest.mark.parametrize("changes", [{}, LAG], ids=["periodic", "delayed"])
def test_a_redis_that_lost_its_last_writes_loses_no_run(
    pipeline: Pipeline, undisturbed: str, tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = short_job(**changes)
    digest = sequential_digest(pipeline, job, tmp_path) if changes else undisturbed
    job_id, _ = pipeline.jobs.create(job)
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        lose_last_writes(pipeline, job_id)
        # A trainer that finds its opening lost ends; its successor, which a consumer would start, opens again.
        if wait_for_exit(trainer, DEADLINE_S) != 0:
            pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, digest)


def test_a_redis_at_maxmemory_makes_the_run_wait_and_says_so(pipeline: Pipeline, undisturbed: str) -> None:
    job_id, _ = pipeline.jobs.create(short_job())
    generator = pipeline.children["producer-1"].pid
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        pipeline.broker.redis.config_set("maxmemory", 1)
        until(lambda: "waits for room in Redis" in job_status(pipeline.broker, job_id).reason, "the job to say so")
        until(lambda: "maxmemory" in pipeline.children["producer-1"].tail(), "the generator to hold its batch")
        with pytest.raises(BrokerFull):
            pipeline.jobs.create(short_job())
        epoch = job_status(pipeline.broker, job_id).trainer_epoch
        pipeline.broker.redis.config_set("maxmemory", 0)
        succeed(trainer)
    assert job_status(pipeline.broker, job_id).trainer_epoch == epoch
    assert pipeline.children["producer-1"].pid == generator
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert_undisturbed(pipeline, job_id, undisturbed)


def test_a_lost_answer_of_every_transition_changes_nothing(tmp_path: Path, undisturbed: str) -> None:
    pipeline = CutPipeline(tmp_path)
    with pipeline:
        pipeline.start_generators(2)
        job_id = pipeline.train(short_job())
        assert_undisturbed(pipeline, job_id, undisturbed)
        assert pipeline.proxy is not None
        lost = pipeline.proxy.lost
    assert [name for name in TRANSITIONS if not lost[function_name(name)]] == []


@long_variant
def test_a_lost_answer_of_a_stage_worker_changes_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    job = short_job(**STAGED)
    with running(pipeline, f"{STAGE_WORKER}-oracle"):
        digest = undisturbed_digest(pipeline, job)
    cut = CutPipeline(tmp_path)
    with cut:
        cut.start_generators(1)
        cut.start(f"{STAGE_WORKER}-1")
        cut.start(f"{STAGE_WORKER}-2")
        assert_undisturbed(cut, cut.train(job), digest)
        assert cut.proxy is not None
        lost = cut.proxy.lost
    assert [name for name in OF_STAGES if not lost[function_name(name)]] == []
