"""The end of a job ends its work: no process samples on, publishes or trains, and no key of the work stays."""

from __future__ import annotations

from typing import Any

import pytest

from broker.connection.client import connect
from broker.fence import read_fence
from broker.generator_side import PublishOutcome
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.trainer_side import TrainerSide
from contracts.errors import Conflict
from contracts.jobs import JobState
from contracts.settings import StackSettings
from tests.integration.fence_parts import change_fence
from tests.integration.test_fence import Job, answer_to, claimed, opened

LEASE_S = 600.0


@pytest.fixture(name="job")
def opened_job(settings: StackSettings) -> Job:
    return opened(connect(settings))


@pytest.mark.parametrize("state", [JobState.CANCELLED, JobState.FAILED, JobState.SUCCEEDED])
@pytest.mark.parametrize("is_by_its_trainer", [True, False])
def test_an_ended_job_is_not_sampled_on_and_keeps_nothing(job: Job, state: JobState, is_by_its_trainer: bool) -> None:
    jobs, keys, redis = JobStore(job.broker), job.broker.job_keys(job.job_id), job.broker.redis
    published, held = claimed(job.generator("g1")), claimed(job.generator("g2"))
    assert job.generator("g1").publish(published, answer_to(published.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    job.trainer.claim_rollouts(0, max_batches=8)
    if state is JobState.CANCELLED:
        jobs.move(job.job_id, JobState.CANCELLING)
    jobs.move(job.job_id, state, trainer_epoch=job.trainer.trainer_epoch if is_by_its_trainer else None)
    generator = job.generator("g2")
    assert generator.renew([held]).settled == (held,)
    assert generator.claim(LEASE_S, hedge=True) is None
    assert generator.publish(held, answer_to(held.prompt_batch, "g2")) is PublishOutcome.ENDED
    assert job_status(job.broker, job.job_id).batches_rejected == {"ended": 1}
    slot = keys.slots[0]
    assert redis.xlen(slot.rollouts) == 0
    groups: Any = redis.xinfo_groups(slot.rollouts)
    assert [(one["pending"], one["consumers"]) for one in groups] == [(0, 0)]
    assert redis.exists(slot.prompts, slot.ledger, slot.claims, slot.work, slot.items) == 0
    assert read_fence(job.broker, keys).state == "closed"


@pytest.mark.parametrize("lock", ["the fence", "the job's state"])
def test_each_of_the_two_locks_holds_alone(job: Job, lock: str) -> None:
    """The end of a job closes the fence; what is opened by hand shows that the other lock holds too."""
    held, keys, redis = claimed(job.generator("g1")), job.broker.job_keys(job.job_id), job.broker.redis
    if lock == "the fence":
        change_fence(job.broker, keys, is_open=False, committed=0)
    else:
        redis.hset(keys.job, "state", "cancelled")
    assert job.generator("g2").claim(LEASE_S) is None
    outcome = job.generator("g1").publish(held, answer_to(held.prompt_batch, "g1"))
    assert outcome is (PublishOutcome.CLOSED if lock == "the fence" else PublishOutcome.ENDED)


def test_a_clock_that_steps_back_holds_nobody_off_for_as_long_as_the_step(job: Job) -> None:
    """Writes the lease as if its holder had got it an hour from now, and had died."""
    redis, keys = job.broker.redis, job.broker.job_keys(job.job_id)
    redis.hset(keys.fence, "lease_until", str(int(1000 * (job.broker.now_s() + 3600 + 1))))
    assert not job.trainer.fence().is_held(job.broker.now_s())
    successor = TrainerSide(job.broker, job.job_id, owner="t2", lease_s=0.001)
    while True:
        try:
            successor.acquire()
        except Conflict:
            continue
        break
    assert successor.trainer_epoch > job.trainer.trainer_epoch
