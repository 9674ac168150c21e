"""Rows by the batch: what crosses the connection and the append-only file once, and items that are put side by side."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from broker.batch_cache import CACHED_BYTES
from broker.connection.roles import STAGE
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.keys import batch_field
from broker.openings import IterationOpening
from broker.stage_side import PutOutcome, StageSide
from contracts.encoding.wire import encode
from contracts.errors import FenceViolation
from contracts.rollouts import RolloutBatch, batch_digest
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import manifest
from tests.integration.fence_parts import weights_digest
from tests.integration.stage_parts import NUM_ROWS, StagedJob, external, open_job, sampled

JUDGE = [external("judge")]
LARGE = 3 * 2**17
"""Characters that make a batch a large one."""


@pytest.fixture(name="job")
def judged_job(redis_server: EmbeddedRedis) -> StagedJob:
    return open_job(redis_server, JUDGE, count=3)


def with_text(batch: RolloutBatch, text: str) -> RolloutBatch:
    """The batch, whose first rollout says this."""
    replace, (first, *groups) = msgspec.structs.replace, batch.groups
    rollouts = (replace(first.rollouts[0], text=text), *first.rollouts[1:])
    return replace(batch, groups=(replace(first, rollouts=rollouts), *groups))


def publish_large(job: StagedJob, text: str = "x" * LARGE) -> RolloutBatch:
    side, claim, small = job.sample()
    batch = with_text(small, text)
    assert side.publish(claim, batch) is PublishOutcome.ACCEPTED
    return batch


def test_a_large_batch_is_read_where_it_stands_and_is_whole(job: StagedJob) -> None:
    batch = publish_large(job)
    items = job.stage().claim("judge", NUM_ROWS)
    assert [item.item for item in items] == list(range(NUM_ROWS))
    assert batch_digest(items[0].batch) == batch_digest(batch)
    assert job.stage().put([(item, job.made(item)) for item in items]) == [PutOutcome.ACCEPTED] * NUM_ROWS
    (arrived,), _ = job.trainer.claim_rollouts(0, max_batches=9)
    assert (arrived.batch, arrived.num_bytes) == (batch, len(encode(batch)))


def test_a_large_batch_that_is_another_one_by_now_is_not_worked_on(job: StagedJob) -> None:
    publish_large(job)

    class Between(StageSide):
        """A restart loses the batch between the claim and the look at it."""

        def _large_payload(self, found: object) -> bytes | None:
            job.operator.redis.hdel(job.keys.slots[0].ledger, "0/train/0")
            return super()._large_payload(found)  # type: ignore[arg-type]

        def _give_back(self, *_: object, **__: object) -> NoReturn:
            raise AssertionError("its items are not failed: nothing is wrong with them")

    assert Between(job.brokers[STAGE], job.job_id, "s1").claim("judge", NUM_ROWS) == []


def test_a_batch_crosses_the_append_only_file_once_until_it_is_trained(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        job = open_job(server, JUDGE)
        before = job.operator.redis.info("persistence")["aof_current_size"]  # type: ignore[index]
        publish_large(job)
        job.run_stage("judge")
        assert job.arrived() == ["0/train/0"]
        written = job.operator.redis.info("persistence")["aof_current_size"] - before  # type: ignore[index]
    assert LARGE < written < LARGE * 1.1


def test_a_batch_that_is_gone_beside_its_columns_ends_its_trainer(job: StagedJob) -> None:
    job.publish()
    job.run_stage("judge")
    job.operator.redis.hdel(job.keys.slots[0].items, batch_field("0/train/0"))
    with pytest.raises(FenceViolation, match="0/train/0 is gone"):
        job.arrived()


def test_another_batch_in_its_place_is_refused_by_the_trainer(job: StagedJob) -> None:
    batch = job.publish()
    job.run_stage("judge")
    other = encode(with_text(batch, "another one"))
    job.operator.redis.hset(job.keys.slots[0].items, batch_field(batch.batch_id), other)
    with pytest.raises(FenceViolation, match="not what the ledger recorded"):
        job.arrived()


def test_what_a_wait_brought_keeps_its_order_beside_evaluations(redis_server: EmbeddedRedis) -> None:
    """Batches with columns stand elsewhere, evaluations on the stream itself; a claim takes both as they came."""
    job = StagedJob(redis_server, JUDGE)
    digest = weights_digest(0, 0)
    job.trainer.publish_weights(manifest(0, digest), oldest_kept=0)
    batches = (*job.prompts(0, 2), *job.prompts(0, 2, purpose="evaluation"))
    job.trainer.open_iteration(
        IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=batches), {0: digest}
    )
    drawn = [job.sample() for _ in batches]
    order = {
        (claim.prompt_batch.purpose, claim.prompt_batch.batch_id[-1]): at for at, (_, claim, _) in enumerate(drawn)
    }

    def publish(purpose: str, number: int) -> None:
        side, claim, batch = drawn[order[purpose, str(number)]]
        assert side.publish(claim, batch) is PublishOutcome.ACCEPTED
        job.run_stage("judge")

    expected = [("evaluation", 0), ("train", 0), ("evaluation", 1), ("train", 1)]
    for one in expected:
        publish(*one)
    job.trainer.wait_for_rollouts(0, 0.1)
    assert job.arrived() == [f"0/{purpose}/{number}" for purpose, number in expected]


def kept(side: StageSide, job: StagedJob) -> list[list[str]]:
    """The ids of the batches that it sends with each claim of a whole batch, until there is none."""
    ids: list[list[str]] = []
    while side.claim("judge", NUM_ROWS):
        ids.append(sorted(side._batches.by_id()))
    return ids


@pytest.mark.parametrize(("text", "num_kept"), [("x", 3), ("x" * (CACHED_BYTES // 2), 1)])
def test_a_worker_keeps_no_more_bytes_than_it_may_and_always_the_newest_batch(
    job: StagedJob, text: str, num_kept: int
) -> None:
    for _ in range(3):
        publish_large(job, text)
    ids = [f"0/train/{number}" for number in range(3)]
    assert kept(job.stage(), job)[-1] == ids[3 - num_kept :]


def test_leases_that_ended_are_counted_and_buried_together_and_the_rest_goes_out(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", max_attempts=1)], count=2)
    job.publish_all(2)
    of_first = job.stage("s1").claim("judge", NUM_ROWS)
    for item in of_first:
        job.expire(item)
    items = job.stage("s2").claim("judge", 1000)
    assert [(item.batch_id, item.item) for item in items] == [("0/train/1", row) for row in range(NUM_ROWS)]
    assert list(job.trainer.dead_batches(0)) == ["0/train/0"]
    assert job.operator.redis.zcard(job.keys.slots[0].work) == NUM_ROWS
    assert not any(key.startswith(b"l/0/0/train/0") for key in job.operator.redis.hkeys(job.keys.slots[0].items))


def test_a_refused_copy_of_a_published_batch_leaves_it_as_it_is(job: StagedJob) -> None:
    batch = publish_large(job)
    columns, field = job.keys.slots[0].items, batch_field(batch.batch_id)
    before = job.operator.redis.hget(columns, field)
    side, claim, _ = job.sample("g2")
    late = msgspec.structs.replace(
        claim, prompt_batch=msgspec.structs.replace(claim.prompt_batch, batch_id=batch.batch_id)
    )
    assert isinstance(side, GeneratorSide)
    other = with_text(sampled(late.prompt_batch, "g2", seed=4), "y" * LARGE)
    assert side.publish(late, other) is PublishOutcome.DUPLICATE
    assert job.operator.redis.hget(columns, field) == before
    assert set(job.operator.redis.hkeys(columns)) == {field.encode(), b"l/0/0/train/1/0"}  # type: ignore[arg-type]
