"""Several open iterations where something goes wrong: lost answers, lost writes, dead batches, a resume, an end."""

from __future__ import annotations

from typing import Any

import pytest

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.leases import FailOutcome
from contracts.encoding.wire import encode
from contracts.errors import FenceViolation
from contracts.settings import StackSettings
from tests.integration.fence_parts import StutteringBroker
from tests.integration.window_parts import LEASE_S, NUM_TRAIN, LaggingJob, lagging_spec


@pytest.fixture
def broker(settings: StackSettings) -> StutteringBroker:
    return StutteringBroker(connect(settings).redis)


def begun(broker: Broker, lag: int = 1, *, num_done: int = 0, evaluates: bool = False) -> LaggingJob:
    """A delayed job of which so many iterations are committed."""
    job = LaggingJob(broker, lagging_spec(lag), evaluates)
    job.start()
    for iteration in range(num_done):
        job.sample()
        job.commit(iteration)
    return job


# Evaluation


def test_a_commit_whose_evaluation_was_never_sent_is_refused_and_reconciling_sends_it(broker: Broker) -> None:
    job = begun(broker, evaluates=True, num_done=2)
    job.sample()
    partly = job.trained(2)
    with pytest.raises(FenceViolation, match="missing dispatch"):
        job.commit(2, partly)
    successor = job.trainer = job.new_trainer("t2")
    expected = [*job.batches(2), *job.evaluation(2)]
    assert successor.reconcile(2, expected) == 1
    assert successor.reconcile(2, expected) == 0
    assert [batch.policy_version for batch in job.sample(count=1)] == [2]
    job.commit(2, partly | job.trained(2))
    assert job.fence.committed == 2


# Lost answers


def test_a_wait_brings_the_rollouts_of_the_iteration_that_it_waits_for(broker: StutteringBroker) -> None:
    job = begun(broker)
    job.sample(count=2 * NUM_TRAIN)
    for iteration in (1, 0):
        job.trainer.wait_for_rollouts(iteration, 600.0)
        arrived, _ = job.trainer.claim_rollouts(iteration, max_batches=9)
        assert {one.batch.iteration for one in arrived} == {iteration}
        assert len(arrived) == NUM_TRAIN


def test_a_slot_that_was_read_ahead_forgets_it_when_its_iteration_is_over(broker: StutteringBroker) -> None:
    """Iteration 2 lives where iteration 0 lived."""
    job = begun(broker)
    job.sample(count=2 * NUM_TRAIN)
    trained = job.trained(0)
    job.trainer.wait_for_rollouts(0, 0.001)
    job.commit(0, trained)
    job.commit(1)
    job.sample()
    job.trainer.wait_for_rollouts(2, 600.0)
    assert sorted(job.trained(2)) == ["2/train/0", "2/train/1"]


# Dead batches


def test_a_batch_that_dies_in_a_later_iteration_is_known_when_its_turn_comes(broker: Broker) -> None:
    job = begun(broker)
    job.sample()
    assert job.generator().fail(job.claim(), "no reward") is FailOutcome.RETRIED
    job.sample(count=1)
    assert job.generator().fail(job.claim(), "no reward: 5:3") is FailOutcome.DEAD
    assert (job.trainer.claim_rollouts(0, max_batches=9)[1], job.trainer.dead_batches(0)) == (0, {})
    assert [one.dead for one in job.fence.window] == [0, 1]
    job.trainer = job.new_trainer("t2")
    job.commit(0)
    arrived, num_dead = job.trainer.claim_rollouts(1, max_batches=9)
    assert (len(arrived), num_dead) == (1, 1)
    assert job.trainer.dead_batches(1) == {"1/train/0": "no reward: 5:3"}
    job.commit(1, {one.batch.batch_id: one.digest for one in arrived})
    assert job.fence.committed == 1


def test_a_batch_of_a_later_iteration_that_kills_its_generators_is_buried(broker: Broker) -> None:
    job = begun(broker)
    job.sample()
    for _ in range(2):
        job.let_expire(job.claim("dies"))
    assert job.claim().prompt_batch.batch_id == "1/train/1"
    assert job.trainer.dead_batches(1) == {"1/train/0": "its generators died 2 times"}


# Lost writes


# Rewind, end, resume, removal


def num_in_work(job: LaggingJob) -> int:
    redis: Any = job.broker.redis
    return sum(redis.xlen(slot.rollouts) + redis.hlen(slot.prompts) + redis.zcard(slot.work) for slot in job.keys.slots)


def assert_nothing_is_in_work(job: LaggingJob) -> None:
    assert num_in_work(job) == 0
    assert job.broker.redis.exists(*(key for slot in job.keys.slots for key in (slot.ledger, slot.claims))) == 0
    assert (job.fence.window, job.fence.versions) == ((), {})
    assert job.generator("late").claim(LEASE_S) is None


def test_a_resume_clears_what_an_end_has_left(broker: Broker) -> None:
    """As where the end of the job was written by hand."""
    job = begun(broker, lag=1)
    job.sample(count=3)
    broker.redis.hset(job.keys.job, "state", "failed")
    JobStore(broker).resume(job.job_id)
    assert_nothing_is_in_work(job)


def test_a_job_whose_spec_cannot_be_read_ends_with_its_whole_window(broker: Broker) -> None:
    job = begun(broker, lag=2)
    job.sample(count=3)
    spec = {"max_policy_lag": 2, "algorithm": {"correction": "a word of another Onbeat"}}
    broker.redis.set(job.keys.spec, encode(spec))
    JobStore(broker).fail(job.job_id, "its spec can't be read")
    assert num_in_work(job) == 0


# Rights


# Memory


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_what_redis_holds_is_bounded_by_the_window_however_long_the_job(broker: Broker, lag: int) -> None:
    job = LaggingJob(broker, lagging_spec(lag))
    job.start()
    held = []
    for iteration in range(3 * (lag + 1)):
        while claim := job.generator(f"g{iteration}").claim(LEASE_S):
            job.publish(claim, f"g{iteration}")
        for name in ("idle", f"idle{iteration}"):
            assert job.generator(name).claim(LEASE_S) is None
        held.append(counts(job))
        job.announce(iteration + 1, oldest_kept=max(0, iteration - lag))
        job.commit(iteration)
    assert len(set(held[lag + 1 :])) == 1, "another iteration, and nothing more"
    assert held[-1] == (NUM_TRAIN * (lag + 1), NUM_TRAIN * (lag + 1), lag + 1)


def counts(job: LaggingJob) -> tuple[int, int, int]:
    """What is in work or with the trainer, fields of ledgers, versions of the fence."""
    fields = sum(job.broker.redis.hlen(slot.ledger) for slot in job.keys.slots)  # type: ignore[misc]
    return num_in_work(job), fields, len(job.fence.versions)
