"""Several open iterations: what opens, which version samples what, what is refused where, and what dies."""

from __future__ import annotations

from typing import Any

import pytest

from broker.connection.client import Broker
from broker.generator_side import PublishOutcome
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.openings import IterationOpening
from contracts.encoding.wire import encode
from contracts.errors import FenceViolation
from tests.integration.fence_parts import set_claim_times, set_typical_time
from tests.integration.window_parts import LEASE_S, NUM_TRAIN, LaggingJob, claimed, digest, lagging_spec


def delayed(broker: Broker, lag: int, *, evaluates: bool = False) -> LaggingJob:
    job = LaggingJob(broker, lagging_spec(lag), evaluates)
    job.start()
    return job


def bounded(broker: Broker, lag: int) -> LaggingJob:
    job = LaggingJob(broker, lagging_spec(lag, schedule="bounded"))
    job.start()
    return job


@pytest.mark.parametrize(
    ("oldest", "newest", "problem"),
    [(1, 1, "no_manifest"), (0, 2, "out_of_order"), (1, 0, "out_of_order"), (-1, 0, "out_of_order")],
    ids=["a version that is not made", "beyond its own", "a range that is none", "below the first"],
)
def test_an_iteration_opens_with_no_versions_but_those_that_its_lag_allows(
    broker: Broker, oldest: int, newest: int, problem: str
) -> None:
    job = LaggingJob(broker, lagging_spec(1))
    job.announce(0)
    job.trainer.open_iteration(job.opening(0), {0: digest(0)})
    with pytest.raises(FenceViolation, match=problem):
        job.trainer.open_iteration(
            IterationOpening(iteration=1, oldest_version=oldest, newest_version=newest, batches=tuple(job.batches(1))),
            {},
        )
    assert job.open_iterations == [0]


def test_a_commit_opens_no_iteration_that_a_version_samples_which_is_not_made(broker: Broker) -> None:
    job = delayed(broker, 1)
    job.sample()
    job.announce(1)
    record = job.record(0, job.trained(0))
    opening = IterationOpening(iteration=2, oldest_version=2, newest_version=2, batches=tuple(job.batches(2)))
    with pytest.raises(FenceViolation, match="no_manifest"):
        job.trainer.commit(record, record.batches, event=None, opening=opening, next_version=(1, digest(1)))
    assert job.open_iterations == [0, 1]


@pytest.mark.parametrize(
    ("held", "held_digest", "version"),
    [(0, digest(0), 0), (1, digest(1), 1), (2, digest(2), 2), (1, "f" * 64, 2), (3, digest(3), 2), (-1, "", 2)],
    ids=["the oldest", "one between", "the newest", "another content", "one that is not made", "none"],
)
def test_a_bounded_batch_goes_to_what_its_generator_holds_and_else_to_the_newest(
    broker: Broker, held: int, held_digest: str, version: int
) -> None:
    """Iteration 2 is the oldest that is open, and versions 0, 1 and 2 may sample it."""
    job = bounded(broker, 2)
    for iteration in range(2):
        job.sample()
        job.commit(iteration)
    claim = claimed(job.generator(), loaded=(held, held_digest))
    batch = claim.prompt_batch
    assert (batch.iteration, batch.policy_version, batch.weights_digest) == (2, version, digest(version))
    assert (claim.manifest.policy_version, claim.manifest.weights_digest) == (version, digest(version))
    assert job.publish(claim) is PublishOutcome.ACCEPTED
    (arrived,), _ = job.trainer.claim_rollouts(2, max_batches=9)
    assert arrived.batch.policy_version == version


def test_of_two_late_batches_the_one_of_the_older_iteration_is_copied_first(broker: Broker) -> None:
    job = delayed(broker, 1)
    job.sample(count=1)
    slow = [job.claim("slow") for _ in range(3)]
    set_typical_time(broker, job.keys, 1.0)
    now_ms = int(broker.now_s() * 1000)
    for claim, age_ms in zip(slow, (5_000, 50_000, 40_000), strict=True):
        iteration = claim.prompt_batch.iteration
        set_claim_times(broker, job.keys, claim.prompt_batch.batch_id, iteration=iteration, claimed_ms=now_ms - age_ms)
    copies = [job.claim("quick", hedge=True) for _ in range(3)]
    assert [(one.hedged, one.prompt_batch.batch_id) for one in copies] == [
        (True, "0/train/1"),
        (True, "1/train/0"),
        (True, "1/train/1"),
    ]
    assert job.publish(copies[1], "quick") is PublishOutcome.ACCEPTED
    assert job.publish(slow[1], "slow") is PublishOutcome.DUPLICATE


def test_a_late_batch_of_a_later_iteration_is_copied_where_the_oldest_has_none(broker: Broker) -> None:
    job = delayed(broker, 1)
    young = job.claim("slow")
    job.sample(count=1)
    late = job.claim("slow")
    job.claim("slow")
    set_typical_time(broker, job.keys, 10.0)
    now_ms = int(broker.now_s() * 1000)
    set_claim_times(broker, job.keys, late.prompt_batch.batch_id, iteration=1, claimed_ms=now_ms - 60_000)
    copy = job.claim("quick", hedge=True)
    assert (copy.hedged, copy.prompt_batch.batch_id) == (True, "1/train/0")
    assert young.prompt_batch.batch_id == "0/train/0"
    assert job.generator("quick").claim(LEASE_S, hedge=True) is None


def test_a_generator_that_waits_wakes_for_a_batch_of_any_slot(broker: Broker) -> None:
    job = delayed(broker, 2)
    job.sample(count=3 * NUM_TRAIN)
    generator = job.generator()
    for iteration in range(4):
        assert generator.claim(LEASE_S) is None
        job.commit(iteration)
        generator.wait_for_prompts(600.0)
        job.sample()


def test_a_status_shows_the_window(broker: Broker) -> None:
    job = delayed(broker, 2)
    job.sample(count=NUM_TRAIN + 1)
    status = job_status(broker, job.job_id)
    assert [(one.iteration, one.batches_published, one.batches_expected) for one in status.window] == [
        (0, 2, 2),
        (1, 1, 2),
        (2, 0, 2),
    ]
    assert (status.max_policy_lag, status.policy_version) == (2, 0)
    assert (status.batches_expected, status.batches_published) == (2, 2), "those of the oldest open iteration"
    job.commit(0)
    status = job_status(broker, job.job_id)
    assert [one.iteration for one in status.window] == [1, 2, 3]
    assert (status.policy_version, status.weights_digest) == (1, digest(1))


def test_a_commit_whose_evaluation_was_never_sent_is_refused_and_reconciling_sends_it(broker: Broker) -> None:
    job = delayed(broker, 1, evaluates=True)
    job.sample()
    job.commit(0)
    with pytest.raises(FenceViolation, match="lacks the version that samples it"):
        job.trainer.dispatch(2, job.evaluation(2))
    job.sample()
    job.commit(1)
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


def test_a_wait_brings_the_rollouts_of_the_iteration_that_it_waits_for(broker: Broker) -> None:
    job = delayed(broker, 1)
    job.sample(count=2 * NUM_TRAIN)
    for iteration in (1, 0):
        job.trainer.wait_for_rollouts(iteration, 600.0)
        arrived, _ = job.trainer.claim_rollouts(iteration, max_batches=9)
        assert {one.batch.iteration for one in arrived} == {iteration}
        assert len(arrived) == NUM_TRAIN


def test_a_slot_that_was_read_ahead_forgets_it_when_its_iteration_is_over(broker: Broker) -> None:
    """Iteration 2 lives where iteration 0 lived."""
    job = delayed(broker, 1)
    job.sample(count=2 * NUM_TRAIN)
    trained = job.trained(0)
    job.trainer.wait_for_rollouts(0, 0.001)
    job.commit(0, trained)
    job.commit(1)
    job.sample()
    job.trainer.wait_for_rollouts(2, 600.0)
    assert sorted(job.trained(2)) == ["2/train/0", "2/train/1"]


def test_a_batch_of_a_later_iteration_that_kills_its_generators_is_buried(broker: Broker) -> None:
    job = delayed(broker, 1)
    job.sample()
    for _ in range(2):
        job.let_expire(job.claim("dies"))
    assert job.claim().prompt_batch.batch_id == "1/train/1"
    assert job.trainer.dead_batches(1) == {"1/train/0": "its generators died 2 times"}


def num_in_work(job: LaggingJob) -> int:
    redis: Any = job.broker.redis
    return sum(redis.xlen(slot.rollouts) + redis.hlen(slot.prompts) + redis.zcard(slot.work) for slot in job.keys.slots)


def test_a_resume_clears_what_an_end_has_left(broker: Broker) -> None:
    """As where the end of the job was written by hand."""
    job = delayed(broker, 1)
    job.sample(count=3)
    broker.redis.hset(job.keys.job, "state", "failed")
    JobStore(broker).resume(job.job_id)
    assert num_in_work(job) == 0
    assert broker.redis.exists(*(key for slot in job.keys.slots for key in (slot.ledger, slot.claims))) == 0
    assert (job.fence.window, job.fence.versions) == ((), {})


def test_a_job_whose_spec_cannot_be_read_ends_with_its_whole_window(broker: Broker) -> None:
    job = delayed(broker, 2)
    job.sample(count=3)
    spec = {"max_policy_lag": 2, "algorithm": {"correction": "a word of another Onbeat"}}
    broker.redis.set(job.keys.spec, encode(spec))
    JobStore(broker).fail(job.job_id, "its spec can't be read")
    assert num_in_work(job) == 0


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
