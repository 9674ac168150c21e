"""What an operator sees of the workers of stages."""

from __future__ import annotations

from typing import Any, cast

import pytest

from broker.keys import sealed_name
from broker.monitor import job_status
from broker.presence import LIVE_S, Presence, StagePresence
from contracts.monitor import GeneratorSeen, StageWorkerSeen
from contracts.spec.stages import LlmJudgeStage, ReferenceStage, TeacherStage
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import StagedJob, external, open_job

STAGES = [external("judge"), external("after", ["judge"], unit="group")]


@pytest.fixture(name="job")
def staged_job(redis_server: EmbeddedRedis) -> StagedJob:
    return open_job(redis_server, STAGES, count=2)


def says(job: StagedJob, worker_id: str, *serves: str, **fields: Any) -> None:
    """A worker of these stages says that it lives."""
    worker = StageWorkerSeen(worker_id=worker_id, serves=serves, **fields)
    StagePresence(job.brokers["stage"]).beat(worker)


def test_a_status_names_the_first_stage_that_no_worker_serves(job: StagedJob) -> None:
    Presence(job.brokers["generator"]).beat(GeneratorSeen(worker_id=f"{job.job_id}-generator"))
    assert job_status(job.brokers["gateway"], job.job_id).reason == "waits for a live worker of stage judge"
    says(job, f"{job.job_id}-w1", f"{job.job_id}/judge", "another-job/after")
    assert job_status(job.brokers["gateway"], job.job_id).reason == "waits for a live worker of stage after"
    says(job, f"{job.job_id}-w2", f"{job.job_id}/after")
    assert job_status(job.brokers["gateway"], job.job_id).reason == ""
    StagePresence(job.brokers["stage"]).leave(f"{job.job_id}-w2")
    unserved = StagePresence(job.brokers["trainer"]).unserved(job.job_id, job.spec.stages)
    assert unserved == {"after": "a live worker of stage after"}


def test_a_worker_of_a_type_serves_the_stages_of_that_type_in_every_job(redis_server: EmbeddedRedis) -> None:
    job = StagedJob(redis_server, [])
    worker = f"{job.job_id}-worker"
    says(job, worker, "reference", items=("0/train/0",))
    (seen,) = (one for one in StagePresence(job.brokers["gateway"]).live() if one.worker_id == worker)
    assert seen.is_for("any", ReferenceStage(name="frozen"))
    assert not seen.is_for("any", TeacherStage(model="m"))
    assert (seen.items, seen.seen_s < LIVE_S) == (("0/train/0",), True)


def test_a_stage_that_the_worker_of_its_type_leaves_alone_is_served_by_none_and_says_why(
    redis_server: EmbeddedRedis,
) -> None:
    job = StagedJob(redis_server, [])
    worker = f"{job.job_id}-worker"
    judge, second = (LlmJudgeStage(model="m", prompt="{completion}", name=name) for name in ("judge", "second"))
    alone = {"other/judge": "elsewhere", f"{job.job_id}/judge": "judge.model: no folder `m`"}
    says(job, worker, "llm_judge", leaves_alone=alone)
    seen_by = StagePresence(job.brokers["gateway"])
    (seen,) = (one for one in seen_by.live() if one.worker_id == worker)
    assert [seen.is_for(job_id, judge) for job_id in (job.job_id, "other", "third")] == [False, False, True]
    assert seen_by.unserved(job.job_id, [second, judge]) == {
        "judge": f"a live worker of stage judge; {worker} doesn't serve it: judge.model: no folder `m`"
    }
    assert seen_by.left_alone(job.job_id, [second, judge]) == {"judge"}
    assert seen_by.left_alone("third", [second, judge]) == frozenset()
    StagePresence(job.brokers["stage"]).leave(worker)


def test_a_stage_worker_that_is_silent_is_not_counted_and_then_forgotten(redis_server: EmbeddedRedis) -> None:
    job = StagedJob(redis_server, [])
    worker = f"{job.job_id}-silent"
    says(job, worker, "reference")
    redis, key = job.operator.redis, sealed_name("stage_workers", job.operator.seal)
    at_ms, _, said = cast(bytes, redis.hget(key, worker)).partition(b" ")
    for later_s, is_kept in ((LIVE_S + 1, True), (-LIVE_S - 1, True), (10 * LIVE_S + 1, False)):
        redis.hset(key, worker, b"%d %s" % (int(at_ms) - 1000 * int(later_s), said))
        assert worker not in [seen.worker_id for seen in StagePresence(job.brokers["gateway"]).live()]
        assert redis.hexists(key, worker) == is_kept
