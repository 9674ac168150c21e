"""What an operator sees of stages: their backlog, leases, ages and workers."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET, json

from broker.keys import sealed_name
from broker.monitor import job_status, stream_report
from broker.presence import LEAVES_ALONE, LIVE_S, Presence, StagePresence
from contracts.spec_tables.stages import LlmJudgeStage, ReferenceStage, TeacherStage
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import GROUP_SIZE, NUM_ROWS, StagedJob, external

STAGES = [external("judge"), external("after", ["judge"], unit="group")]


@pytest.fixture
def job(redis_server: EmbeddedRedis) -> StagedJob:
    job = StagedJob(redis_server, STAGES)
    job.open(count=2)
    return job


def test_a_report_has_each_stages_backlog_leases_and_ages(job: StagedJob) -> None:
    job.publish_all(2)
    side = job.stage("s1")
    held = side.claim("judge", GROUP_SIZE + 1)
    side.put([(item, job.made(item)) for item in held[:GROUP_SIZE]])
    report = stream_report(job.brokers["gateway"], job.job_id)
    assert not isinstance(report.stages, type(UNSET))
    judge, after = report.stages
    assert (judge.stage, judge.num_free, judge.num_leased) == ("judge", 2 * NUM_ROWS - len(held), 1)
    assert (after.stage, after.num_free, after.num_leased) == ("after", 1, 0)
    assert (judge.rows_made, after.rows_made) == (GROUP_SIZE, 0)
    assert judge.oldest_age_s is not None
    assert 0 <= judge.oldest_age_s < 600
    assert report.rows_waiting == 2 * NUM_ROWS
    assert isinstance(report.columns_bytes, int)
    assert report.columns_bytes > 0
    assert not isinstance(report.stage_leases, type(UNSET))
    (lease,) = report.stage_leases
    assert (lease.stage, lease.batch_id, lease.item) == ("judge", held[-1].batch_id, held[-1].item)
    assert (lease.worker_id, lease.attempt) == ("s1", 1)
    assert 0 <= lease.age_s < 600
    assert 0 < lease.lease_s <= 30


def test_failures_and_expired_leases_of_a_stage_are_counted(job: StagedJob) -> None:
    job.publish()
    first, second = job.stage("s1").claim("judge", 2)
    job.stage("s1").fail(first, "no answer")
    job.expire(second)
    job.run_stage("judge", "s2")
    report = stream_report(job.brokers["gateway"], job.job_id)
    assert not isinstance(report.stages, type(UNSET))
    judge = report.stages[0]
    assert (judge.items_failed, judge.items_reclaimed, judge.rows_made) == (1, 1, NUM_ROWS)
    assert (judge.num_free, judge.num_leased, judge.oldest_age_s) == (0, 0, None)


def test_a_job_without_stages_reports_none(redis_server: EmbeddedRedis) -> None:
    job = StagedJob(redis_server, [])
    job.open()
    job.publish()
    report: Any = json.decode(json.encode(stream_report(job.brokers["gateway"], job.job_id)))
    assert not {"stages", "stage_leases", "stage_workers", "rows_waiting", "columns_bytes"} & report.keys()
    assert job.arrived() == ["0/train/0"]


def board(job: StagedJob, *serves: str) -> StagePresence:
    """Where a worker of these stages says that it lives."""
    return StagePresence(job.brokers["stage"], serves)


def test_a_status_names_the_first_stage_that_no_worker_serves(job: StagedJob) -> None:
    Presence(job.brokers["generator"]).beat(f"{job.job_id}-generator", {})
    assert job_status(job.brokers["gateway"], job.job_id).reason == "waits for a live worker of stage judge"
    board(job, f"{job.job_id}/judge", "another-job/after").beat(f"{job.job_id}-w1", {})
    assert job_status(job.brokers["gateway"], job.job_id).reason == "waits for a live worker of stage after"
    presence = board(job, f"{job.job_id}/after")
    presence.beat(f"{job.job_id}-w2", {})
    assert job_status(job.brokers["gateway"], job.job_id).reason == ""
    presence.leave(f"{job.job_id}-w2")
    unserved = StagePresence(job.brokers["trainer"]).unserved(job.job_id, job.spec.stages)
    assert unserved == {"after": "a live worker of stage after"}


def test_a_worker_of_a_type_serves_the_stages_of_that_type_in_every_job(redis_server: EmbeddedRedis) -> None:
    job = StagedJob(redis_server, [])
    worker = f"{job.job_id}-worker"
    board(job, "reference").beat(worker, {"model": "m"})
    (seen,) = (one for one in StagePresence(job.brokers["gateway"]).live() if one.worker_id == worker)
    assert seen.is_for("any", ReferenceStage(name="frozen"))
    assert not seen.is_for("any", TeacherStage(model="m"))
    assert seen.info == {"model": "m"}


def test_a_stage_that_the_worker_of_its_type_leaves_alone_is_served_by_none_and_says_why(
    redis_server: EmbeddedRedis,
) -> None:
    job = StagedJob(redis_server, [])
    presence, worker = board(job, "llm_judge"), f"{job.job_id}-worker"
    judge, second = (LlmJudgeStage(model="m", prompt="{completion}", name=name) for name in ("judge", "second"))
    lines = f"other/judge: elsewhere\n{job.job_id}/judge: judge.model: no folder `m`"
    presence.beat(worker, {LEAVES_ALONE: lines})
    seen_by = StagePresence(job.brokers["gateway"])
    (seen,) = (one for one in seen_by.live() if one.worker_id == worker)
    assert [seen.is_for(job_id, judge) for job_id in (job.job_id, "other", "third")] == [False, False, True]
    assert seen_by.unserved(job.job_id, [second, judge]) == {
        "judge": f"a live worker of stage judge; {worker} leaves it alone: judge.model: no folder `m`"
    }
    presence.leave(worker)


def test_a_stage_worker_that_is_silent_is_not_counted_and_then_forgotten(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = StagedJob(redis_server, [])
    worker = f"{job.job_id}-silent"
    board(job, "reference").beat(worker, {})
    now_s = job.brokers["stage"].now_s()
    for later_s, is_kept in ((LIVE_S + 1, True), (10 * LIVE_S + 1, False)):
        monkeypatch.setattr(job.brokers["gateway"], "now_s", lambda later_s=later_s: now_s + later_s)
        assert worker not in [one.worker_id for one in StagePresence(job.brokers["gateway"]).live()]
        assert job.operator.redis.hexists(sealed_name("stage_workers", job.operator.seal), worker) == is_kept
