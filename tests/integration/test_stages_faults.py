"""Stages where something goes wrong: dead workers, late puts, ends, a resume, a rewind, a restart that lost writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.generator_side import PublishOutcome
from broker.keys import STAGE_BAND
from broker.leases import FailOutcome
from broker.stage_side import PutOutcome, wait_for_items
from contracts.encoding.arrays import pack_float32
from contracts.encoding.wire import encode
from contracts.errors import ContractViolation, FenceViolation
from contracts.jobs import JobState, ResumeRequest
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.settings import StackSettings
from onbeat.loop.gathering import staged_batch
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import NUM_ROWS, StagedJob, external, open_job
from tests.integration.test_broker_restart import Crash

JUDGE = [external("judge", unit="batch")]
TWO = [external("judge"), external("after", ["judge"], unit="batch")]


def judged(server: EmbeddedRedis, count: int = 1, **spec: object) -> StagedJob:
    return open_job(server, JUDGE, count=count, **spec)


def test_a_clock_that_steps_back_lengthens_no_lease(redis_server: EmbeddedRedis) -> None:
    job = judged(redis_server)
    job.publish()
    (item,) = job.stage("s1").claim("judge")
    work = job.keys.slots[0].work
    far_ms = int(1000 * (job.brokers["stage"].now_s() + 3600))
    job.operator.redis.zadd(work, {f"1/{item.batch_id}/0": STAGE_BAND + far_ms})
    (again,) = job.stage("s2").claim("judge")
    assert again.attempt == 2


def end(job: StagedJob) -> None:
    job.jobs.request_cancel(job.job_id)
    job.jobs.move(job.job_id, JobState.CANCELLED)


def test_a_full_table_pushes_back_until_stages_have_caught_up_and_one_batch_always_goes(
    redis_server: EmbeddedRedis,
) -> None:
    job = judged(redis_server, count=2, limits__max_waiting_rows=NUM_ROWS - 1)
    job.publish()
    side, claim, batch = job.sample()
    rejected = job.operator.redis.hgetall(job.keys.counters)
    assert [side.publish(claim, batch) for _ in range(2)] == [PublishOutcome.FULL] * 2
    assert job.operator.redis.hgetall(job.keys.counters) == rejected, "it is no rejection"
    assert side.renew([claim]).lost == ()
    job.run_stage("judge")
    assert side.publish(claim, batch) is PublishOutcome.ACCEPTED
    assert side.publish(claim, batch) is PublishOutcome.ACCEPTED, "its answer was lost"


def test_a_batch_without_the_texts_that_stages_read_is_refused_where_it_is_published(
    redis_server: EmbeddedRedis,
) -> None:
    job = open_job(redis_server, [external("judge", ["prompt"])])
    side, claim, batch = job.sample()
    with pytest.raises(ContractViolation, match="lacks prompt_text or reference"):
        side.publish(claim, batch)


def test_an_item_whose_batch_no_worker_can_read_fails_with_the_reason(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", unit="batch", max_attempts=2)], count=2)
    job.publish_all(2)
    job.operator.redis.hset(job.keys.slots[0].items, "b/0/train/0", encode({"no": "batch"}))
    side = job.stage()
    assert [item.batch_id for item in side.claim("judge", 2 * NUM_ROWS)] == ["0/train/1"]
    assert side.claim("judge") == []
    (reason,) = job.trainer.dead_batches(0).values()
    assert reason.startswith("stage judge: ")
    assert "no" in reason


def test_workers_that_wait_are_woken_by_a_publication_and_miss_none(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, TWO)
    side, other = job.stage(), job.stage("s2")
    assert side.claim("judge") == other.claim("judge") == []
    job.publish()
    wait_for_items([(side, None)], 3600)
    wait_for_items([(other, ["judge"])], 3600)
    items = side.claim("judge", NUM_ROWS)
    wait_for_items([(side, ["judge"])], 3600)
    assert side.claim("after") == []
    side.put([(item, job.made(item)) for item in items])
    wait_for_items([(side, ["after"])], 3600)
    assert len(side.claim("after")) == 1


def test_a_worker_waits_no_longer_than_anothers_lease(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", unit="batch", lease_s=0.05)])
    job.publish()
    assert len(job.stage("s1").claim("judge")) == 1
    side = job.stage("s2")
    if side.claim("judge") == []:
        wait_for_items([(side, None)], 3600)
        while side.claim("judge") == []:
            wait_for_items([(side, None)], 3600)


@pytest.fixture
def crash(server: EmbeddedRedis) -> Iterator[Crash]:
    broker = connect(StackSettings(redis_url=server.url))
    yield Crash(server, broker)
    broker.close()


def test_a_restart_that_lost_puts_claims_and_a_publication_has_them_made_again(crash: Crash) -> None:
    job = open_job(crash.server, TWO, count=2)
    job.publish()
    mark = crash.mark()
    (first, *_) = items = job.stage("s1").claim("judge", 3)
    assert job.stage("s1").put([(first, job.made(first))]) == [PutOutcome.ACCEPTED]
    job.publish("g2")
    assert crash.broker.durability.persisted()
    crash.kill_and_restart(keep_bytes=mark)
    job.server.load_scripts()
    assert job.stage("s1").renew(items).lost == tuple(items)
    assert job.stage("s1").put([(first, job.made(first))]) == [PutOutcome.ACCEPTED], "what it was made of stands there"
    job.run_stage("judge")
    job.run_stage("after")
    assert job.arrived() == ["0/train/0"]
    job.trainer.reconcile(0, job.prompts(0, 2))
    prompts = job.operator.redis.hlen(job.keys.slots[0].prompts)
    assert prompts == 1, "the publication that was lost is sampled again"


def test_a_restart_that_lost_the_last_columns_of_a_batch_is_noticed_by_the_trainer_that_reads_them(
    crash: Crash,
) -> None:
    job = judged(crash.server)
    batch = job.publish()
    mark = crash.mark()
    job.run_stage("judge")
    assert job.arrived() == ["0/train/0"]
    assert crash.broker.durability.persisted()
    crash.kill_and_restart(keep_bytes=mark)
    job.server.load_scripts()
    with pytest.raises(FenceViolation, match="item 0 lacks its columns"):
        job.trainer.columns(batch)
    job.run_stage("judge")
    assert job.new_trainer("t1").claim_rollouts(0, max_batches=1)[0][0].batch.batch_id == "0/train/0"


def test_columns_that_a_stage_user_forged_are_refused_by_the_trainer(redis_server: EmbeddedRedis) -> None:
    job = judged(redis_server)
    batch = job.publish()
    job.run_stage("judge")
    for forged in (b"\xc1", encode({"judge": []}), encode({"judge": [b"\0" * 4] * NUM_ROWS, "reward": []})):
        job.operator.redis.hset(job.keys.slots[0].items, "c/1/0/train/0/0", forged)
        with pytest.raises(ContractViolation):
            job.trainer.columns(batch)


def test_what_a_stage_cannot_judge_is_dead_until_a_resume_states_a_score_and_then_trained_with_its_reason(
    redis_server: EmbeddedRedis,
) -> None:
    job = open_job(redis_server, [{"type": "reward_model", "model": "m", "max_attempts": 1}])
    publish_with_texts(job)
    (item,) = job.stage().claim("reward_model")
    assert job.stage().fail(item, "5000 tokens") is FailOutcome.DEAD
    end(job)
    job.jobs.resume(job.job_id, ResumeRequest(on_failure={"reward_model": -1.5}))
    job.stages.clear()  # its workers read the spec again
    job.spec = job.jobs.spec(job.job_id)
    job.trainer = job.new_trainer("t2")
    job.open()
    batch = publish_with_texts(job)
    side = job.stage()
    for number, item in enumerate(side.claim("reward_model", 100)):
        score, reason = (-1.5, b"too_long") if number == 1 else (0.5, b"")
        values = {"reward_model": [pack_float32([score])], "reward_model_failure": [reason]}
        assert side.put([(item, values)]) == [PutOutcome.ACCEPTED]
    (arrived,), _ = job.trainer.claim_rollouts(0, max_batches=9)
    assert arrived.digest == batch_digest(batch), "what was sampled is what it was"
    as_trained, _ = staged_batch(arrived.batch, job.trainer.columns(arrived.batch), job.spec)
    rollouts = [one for group in as_trained.groups for one in group.rollouts]
    assert [one.unscorable for one in rollouts] == [{}, {"reward_model": "too_long"}, *[{}] * (NUM_ROWS - 2)]
    assert rollouts[1].reward_breakdown["reward_model"] == -1.5


def publish_with_texts(job: StagedJob) -> RolloutBatch:
    side, claim, batch = job.sample()
    groups = tuple(replace(group, prompt_text="p", reference="r") for group in batch.groups)
    batch = replace(batch, groups=groups)
    assert side.publish(claim, batch) is PublishOutcome.ACCEPTED
    return batch
