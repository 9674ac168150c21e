"""Guards of the stage scripts that stand behind another one: each test opens the first, as a lost write would."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from broker.connection.roles import GENERATOR, STAGE
from broker.leases import FailOutcome, Lease, Renewal
from broker.stage_side import PutOutcome, StageSide, wait_for_items
from contracts.encoding.wire import decode
from contracts.errors import NotFound, OnbeatError
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.fence_parts import change_fence
from tests.integration.stage_parts import StagedJob, external, open_job

CHAIN = (external("judge"), external("after", inputs=("judge",), unit="batch"))


@pytest.fixture(name="job")
def published_job(redis_server: EmbeddedRedis) -> StagedJob:
    job = open_job(redis_server, CHAIN)
    job.publish()
    return job


def end(job: StagedJob) -> None:
    """The job has ended, though its iteration stands open."""
    job.operator.redis.hset(job.keys.job, "state", "cancelled")


def close(job: StagedJob) -> None:
    """No iteration is open, though its slot is full."""
    change_fence(job.operator, job.keys, is_open=False)


def claim_raw(job: StagedJob, max_rows: int, heard: int = 0) -> list[Any]:
    """The answer of the script to a worker that holds no batch."""
    return job.brokers[STAGE].run(
        "claim_rows",
        job=job.job_id,
        heard=heard,
        worker="s9",
        stage=1,
        name="judge",
        stages=job.spec.stage_graph.for_scripts(),
        lease_ms=1000,
        max_attempts=4,
        max_rows=max_rows,
        held={},
        is_idle=True,
    )


def test_a_batch_crosses_the_connection_once_for_all_of_its_items(job: StagedJob) -> None:
    _, packed, *values = claim_raw(job, 3)
    answer = decode(packed, dict)
    assert (len(answer["batches"][0]["items"]), answer["fields"], len(values)) == (3, ["b/0/train/0"], 1)


@pytest.mark.parametrize("named", [{"digest": "of another one"}, {"batch_id": "0/train/9"}])
def test_a_batch_that_is_not_the_one_that_is_named_is_gone(job: StagedJob, named: dict[str, Any]) -> None:
    (item,) = job.stage().claim("judge")
    told: dict[str, Any] = {"iteration": 0, "batch_id": "0/train/0", "digest": item.digest}
    assert job.brokers[STAGE].run("read_batch", job=job.job_id, **told)[0] == b"read"
    assert job.brokers[STAGE].run("read_batch", job=job.job_id, **(told | named)) == [b"gone"]


def test_a_claim_that_finds_nothing_says_for_how_long(job: StagedJob) -> None:
    _, packed, *_ = claim_raw(job, 100)
    outcome, due_ms = claim_raw(job, 100, heard=decode(packed, dict)["claim"])
    assert (outcome, 0 < due_ms <= 1000) == (b"none", True)


def test_nothing_is_claimed_of_a_job_that_has_ended_though_its_items_are_there(job: StagedJob) -> None:
    end(job)
    assert job.stage().claim("judge", 100) == []


@pytest.mark.parametrize("over", [end, close])
def test_an_item_of_what_is_over_is_settled_though_it_is_there(job: StagedJob, over: Any) -> None:
    (item,) = job.stage().claim("judge")
    over(job)
    assert job.stage().renew([item]).settled == (item,)
    assert job.stage().fail(item, "no answer") is FailOutcome.SETTLED
    assert job.stage().put([(item, job.made(item))]) == [PutOutcome.SETTLED]


def test_no_worker_renews_or_gives_back_what_is_of_the_other_role(redis_server: EmbeddedRedis) -> None:
    job = open_job(redis_server, CHAIN, count=2)
    job.publish()
    generator, claim, _ = job.sample()
    (item,) = job.stage().claim("judge")
    of_prompt = Lease(stage=0, iteration=0, batch_id=claim.prompt_batch.batch_id, item=0, claim=claim.number)
    of_item = Lease(stage=1, iteration=0, batch_id=item.batch_id, item=0, claim=item.claim)
    told = {"max_attempts": 1, "reason": "forged", "is_released": False, "fault": ""}
    refused = "a lease of the other role"
    for role in (GENERATOR, STAGE):
        with pytest.raises(OnbeatError, match=refused):
            job.brokers[role].run("renew", job=job.job_id, leases=[of_item if role == GENERATOR else of_prompt])
    with pytest.raises(OnbeatError, match=refused):
        job.brokers[GENERATOR].run("fail_batch", job=job.job_id, lease=of_item, **told)
    with pytest.raises(OnbeatError, match=refused):
        job.brokers[STAGE].run("fail_rows", job=job.job_id, lease=of_prompt, stages=[], **told)
    assert generator.renew([claim]) == job.stage().renew([item]) == Renewal()


def test_an_item_that_was_never_handed_out_takes_no_columns(job: StagedJob) -> None:
    (item,) = job.stage().claim("judge")
    beyond = dataclasses.replace(item, item=99)
    assert job.stage().put([(beyond, job.made(item))]) == [PutOutcome.NOT_READY]
    assert job.arrived() == []


def test_no_columns_are_no_call_and_no_job_is_an_error(job: StagedJob) -> None:
    of_none = StageSide(job.brokers[STAGE], "job-none", "s1")
    assert of_none.put([]) == []
    with pytest.raises(NotFound, match="there is no job job-none"):
        of_none.claim("judge")
    with pytest.raises(ValueError, match="no job to wait for"):
        wait_for_items([], 0.1)
