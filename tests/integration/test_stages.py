"""Stages against a real server: what is free when, and who may put what."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from broker.leases import FailOutcome
from broker.stage_side import PutOutcome
from contracts.encoding.arrays import pack_float32
from contracts.errors import ContractViolation, FenceViolation, NotFound
from contracts.rollouts import batch_digest
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import GROUP_SIZE, NUM_GROUPS, NUM_ROWS, StagedJob, external, open_job

ROW = [external("judge")]
CHAIN = [
    external("rows"),
    external("groups", ["rows", "reward"], unit="group"),
    external("whole", ["groups", "rows"], unit="batch"),
    external("after", ["whole"]),
]


def numbers(*rows: int) -> tuple[bytes, ...]:
    return tuple(pack_float32([float(row)]) for row in rows)


@pytest.fixture
def chain(redis_server: EmbeddedRedis) -> StagedJob:
    return open_job(redis_server, CHAIN)


@pytest.fixture
def judged(redis_server: EmbeddedRedis) -> StagedJob:
    return open_job(redis_server, ROW, count=2)


def test_a_batch_passes_its_stages_and_then_the_trainer_gets_it_with_its_columns(chain: StagedJob) -> None:
    batch = chain.publish()
    for name, count in (("rows", NUM_ROWS), ("groups", NUM_GROUPS), ("whole", 1), ("after", NUM_ROWS)):
        assert chain.arrived() == []
        assert chain.run_stage(name) == [PutOutcome.ACCEPTED] * count
    assert chain.arrived() == [batch.batch_id]
    columns = chain.trainer.columns(batch)
    assert columns == dict.fromkeys(("rows", "groups", "whole", "after"), numbers(*range(NUM_ROWS)))
    with pytest.raises(FenceViolation, match="not what the ledger records by now"):
        chain.trainer.columns(replace(batch, policy_version=1))


def test_an_item_that_fails_is_tried_again_and_past_its_attempts_the_batch_is_dead(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, [external("judge", max_attempts=2)])
    job.publish()
    side = job.stage()
    (item, other) = side.claim("judge", 2)
    assert side.fail(item, "no number") is FailOutcome.RETRIED
    assert side.fail(item, "no number") is FailOutcome.SETTLED, "it is held by none"
    items = job.stage("s2").claim("judge", NUM_ROWS)
    assert {one.item: one.attempt for one in items}[item.item] == 2
    again = next(one for one in items if one.item == item.item)
    assert job.stage("s2").fail(again, "no number") is FailOutcome.DEAD
    assert job.trainer.dead_batches(0) == {"0/train/0": "stage judge: no number"}
    assert side.put([(other, job.made(other))]) == [PutOutcome.SETTLED]
    assert job.left_behind() == {"waiting:0"}
    assert job.operator.redis.hget(job.keys.progress, "waiting:0") == b"0"
    assert job.trainer.claim_rollouts(0, max_batches=1) == ([], 1)


def test_what_is_no_output_of_the_stage_is_refused_before_it_is_sent(judged: StagedJob) -> None:
    judged.publish()
    side = judged.stage()
    (item,) = side.claim("judge")
    for values, problem in (
        ({}, "column judge is missing"),
        ({"judge": []}, "0 values for 1 rows"),
        ({"judge": [b"\0" * 8]}, "8 bytes are not 1 x float32"),
        ({"judge": [b"\0" * 4], "reward": [b"\0" * 8]}, "column reward is no output of this stage"),
    ):
        with pytest.raises(ContractViolation, match=problem):
            side.put([(item, values)])
    assert side.put([(item, judged.made(item))]) == [PutOutcome.ACCEPTED]
    with pytest.raises(NotFound, match="no stage teacher"):
        side.claim("teacher")


def test_a_worker_that_holds_a_batch_gets_it_once(judged: StagedJob) -> None:
    batch = judged.publish()
    side = judged.stage()
    first, second = side.claim("judge")[0], side.claim("judge")[0]
    assert first.batch is second.batch
    assert batch_digest(first.batch) == batch_digest(batch) == first.digest


def test_the_trainer_sees_which_stages_have_work_free_or_leased_and_which_none(chain: StagedJob) -> None:
    assert chain.trainer.stages_with_work(0) == []
    chain.publish()
    assert chain.trainer.stages_with_work(0) == ["rows"]
    side = chain.stage()
    items = side.claim("rows", NUM_ROWS)
    assert chain.trainer.stages_with_work(0) == ["rows"]
    side.put([(item, chain.made(item)) for item in items[:GROUP_SIZE]])
    assert chain.trainer.stages_with_work(0) == ["rows", "groups"]
    side.put([(item, chain.made(item)) for item in items[GROUP_SIZE:]])
    for name in ("groups", "whole", "after"):
        assert chain.trainer.stages_with_work(0) == [name]
        chain.run_stage(name)
    assert chain.trainer.stages_with_work(0) == []
