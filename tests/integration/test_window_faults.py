"""Several open iterations where something goes wrong: lost answers, lost writes, dead batches, a resume, an end."""

from __future__ import annotations

from typing import Any

import pytest

from broker.connection.client import Broker, connect
from broker.generator_side import PublishOutcome
from broker.job_store import JobStore
from broker.leases import FailOutcome
from broker.monitor import job_status
from contracts.encoding.wire import encode
from contracts.errors import FencedOff, FenceViolation
from contracts.jobs import JobState
from contracts.settings import StackSettings
from tests.integration.fence_parts import StutteringBroker
from tests.integration.window_parts import LEASE_S, NUM_TRAIN, LaggingJob, digest, lagging_spec


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


@pytest.mark.parametrize("lag", [0, 1])
def test_a_trainer_whose_commit_was_lost_takes_away_no_version_that_the_window_needs(broker: Broker, lag: int) -> None:
    job = begun(broker, lag, num_done=1)
    disk = job.dump()
    job.sample()
    job.commit(1)
    job.restore(disk)
    # It has not noticed, and goes on: its step of iteration 2 announces version 3.
    job.announce(3, oldest_kept=2 - lag)
    claim = job.claim()
    assert (claim.prompt_batch.iteration, claim.manifest.policy_version) == (1, 1 - lag)


def test_a_restart_that_lost_an_opening_of_the_window_is_noticed_by_its_trainer(broker: Broker) -> None:
    job = LaggingJob(broker, lagging_spec(1))
    job.announce(0)
    job.trainer.open_iteration(job.opening(0), {0: digest(0)})
    disk = job.dump()
    job.trainer.open_iteration(job.opening(1), {0: digest(0)})
    job.restore(disk)
    job.sample()
    for call in (
        lambda: job.trainer.reconcile(1, job.batches(1)),
        lambda: job.trainer.claim_rollouts(1, max_batches=1),
        lambda: job.trainer.dispatch(1, job.batches(1)),
    ):
        with pytest.raises(FenceViolation, match="not open at iteration 1"):
            call()
    assert job.trainer.open_iteration(job.opening(1), {0: digest(0)})
    job.commit(0)
    assert job.open_iterations == [1, 2]


# Rewind, end, resume, removal


def num_in_work(job: LaggingJob) -> int:
    redis: Any = job.broker.redis
    return sum(redis.xlen(slot.rollouts) + redis.hlen(slot.prompts) + redis.zcard(slot.work) for slot in job.keys.slots)


def assert_nothing_is_in_work(job: LaggingJob) -> None:
    assert num_in_work(job) == 0
    assert job.broker.redis.exists(*(key for slot in job.keys.slots for key in (slot.ledger, slot.claims))) == 0
    assert (job.fence.window, job.fence.versions) == ((), {})
    assert job.generator("late").claim(LEASE_S) is None


@pytest.mark.parametrize("end", [JobState.FAILED, JobState.CANCELLED])
def test_the_end_of_a_job_in_the_middle_of_its_window_leaves_nothing_in_work(broker: Broker, end: JobState) -> None:
    job = begun(broker, lag=2, num_done=2)
    held = job.claim()
    job.sample(count=3)
    jobs = JobStore(broker)
    if end is JobState.CANCELLED:
        jobs.move(job.job_id, JobState.CANCELLING)
    jobs.move(job.job_id, end)
    assert_nothing_is_in_work(job)
    assert job.publish(held) is PublishOutcome.ENDED
    with pytest.raises(FencedOff):
        job.trainer.reconcile(2, job.batches(2))
    status = job_status(broker, job.job_id)
    assert (status.policy_version, status.weights_digest) == (2, digest(2))
    jobs.resume(job.job_id)
    jobs.move(job.job_id, JobState.RUNNING)
    job.trainer = job.new_trainer("t2")
    job.start(version=2)
    assert job.open_iterations == [2, 3, 4]
    job.sample()
    job.commit(2)


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
