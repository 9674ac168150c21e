"""What the property tests found, one by one: lost answers, late holders, hidden leases, gaps."""

from __future__ import annotations

import pytest

from broker.connection.client import connect
from broker.generator_side import Claim, FailOutcome, PublishOutcome, Renewal
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.errors import FencedOff, FenceViolation
from contracts.events import Rewound
from contracts.settings import StackSettings
from tests.builders import job_spec
from tests.integration.fence_parts import let_expire
from tests.integration.test_fence import DIGEST, Job, answer_to, record

LEASE_S = 600.0


@pytest.fixture
def fence(settings: StackSettings) -> Job:
    """A job with iteration 0 open and twelve batches on the stream."""
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec(rollout__max_attempts=3))
    trainer = TrainerSide(broker, job_id, owner="t1", lease_s=LEASE_S)
    trainer.acquire()
    job = Job(broker, job_id, trainer)
    job.announce(0)
    trainer.open_iteration(job.opening(0, 12), {0: DIGEST})
    return job


def expire(job: Job, claim: Claim) -> None:
    """The lease of a batch has not been renewed for very long."""
    let_expire(job.broker, job.broker.job_keys(job.job_id), claim.prompt_batch.batch_id)


def test_an_expired_lease_is_found_behind_any_number_of_live_ones(fence: Job) -> None:
    alive, dead = fence.generator("alive"), fence.generator("dead")
    for _ in range(11):
        assert alive.claim(LEASE_S)
    last = dead.claim(LEASE_S)
    assert last is not None
    expire(fence, last)
    again = alive.claim(LEASE_S)
    assert again is not None
    assert (again.prompt_batch, again.attempt) == (last.prompt_batch, 2)


def test_who_lost_its_lease_cannot_fail_its_successor_s_work(fence: Job) -> None:
    late, quick = fence.generator("late"), fence.generator("quick")
    lost = late.claim(LEASE_S)
    assert lost is not None
    expire(fence, lost)
    held = quick.claim(LEASE_S)
    assert held is not None
    assert late.fail(lost, "no reward") is FailOutcome.SETTLED
    assert quick.renew([held]) == Renewal()
    assert quick.fail(held, "no reward") is FailOutcome.RETRIED


def test_batches_whose_answer_was_lost_are_answered_again(fence: Job) -> None:
    generator = fence.generator()
    for _ in range(2):
        claim = generator.claim(LEASE_S)
        assert claim is not None
        generator.publish(claim, answer_to(claim.prompt_batch, "g1"))
    epoch = fence.trainer.trainer_epoch
    first = fence.trainer.claim_rollouts(0, max_batches=1)[0]
    told = {"epoch": epoch, "iteration": 0, "max_batches": 8, "last_entry": "0-1", "read_ahead": []}
    fence.broker.run("claim_rollouts", job=fence.job_id, **told)  # delivered, and its answer lost
    assert len(fence.trainer.claim_rollouts(0, max_batches=8)[0]) == 1
    assert fence.trainer.claim_rollouts(0, max_batches=8)[0] == []
    assert first[0].batch.batch_id == "0/train/0"


def test_a_batch_of_another_shape_is_incomplete_even_with_as_many_completions(fence: Job) -> None:
    claim = fence.generator().claim(LEASE_S)
    assert claim is not None
    batch = claim.prompt_batch
    assert (len(batch.prompts), batch.group_size) == (2, 2)
    one_group = answer_to(batch, "g1", num_groups=1, group_size=4)
    assert fence.generator().publish(claim, one_group) is PublishOutcome.INCOMPLETE


def test_another_batch_under_the_same_attempt_is_a_duplicate_not_a_repeat(fence: Job) -> None:
    claim = fence.generator().claim(LEASE_S)
    assert claim is not None
    assert fence.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    other = answer_to(claim.prompt_batch, "g1", seed=1)
    assert fence.generator().publish(claim, other) is PublishOutcome.DUPLICATE


def test_a_rewind_is_recorded_once_however_often_it_is_sent(fence: Job) -> None:
    rewind = record(0, {})
    fence.trainer.rewind(rewind)
    fence.trainer.rewind(rewind)
    jobs = JobStore(fence.broker)
    assert jobs.audit(fence.job_id) == [rewind]
    told = [event for _, event in jobs.events_after(fence.job_id, "0-0") if isinstance(event, Rewound)]
    assert [(event.iteration, event.committed, event.trainer_epoch) for event in told] == [
        (0, -1, rewind.trainer_epoch)
    ]


def test_no_iteration_can_be_skipped(fence: Job) -> None:
    with pytest.raises(FenceViolation, match="out_of_order"):
        fence.trainer.rewind(record(1, {}))
    for index in range(12):
        claim = fence.generator().claim(LEASE_S)
        assert claim is not None, index
        fence.generator().publish(claim, answer_to(claim.prompt_batch, "g1"))
    trained = {one.batch.batch_id: one.digest for one in fence.trainer.claim_rollouts(0, max_batches=12)[0]}
    fence.announce(2)
    with pytest.raises(FenceViolation, match="out_of_order"):
        fence.trainer.commit(record(0, trained), trained, event=None, opening=fence.opening(2), made=(2, DIGEST))
    assert fence.trainer.fence().iteration == 0


def test_a_trainer_that_never_acquired_is_fenced_off(settings: StackSettings) -> None:
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec())
    job = Job(broker, job_id, TrainerSide(broker, job_id, owner="t1", lease_s=LEASE_S))
    with pytest.raises(FencedOff):
        job.announce(0)


def test_an_iteration_opens_only_with_the_weights_that_are_announced(settings: StackSettings) -> None:
    """A restart may have lost the announcement of a successor's weights: the dead trainer's stand in its place."""
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec())
    trainer = TrainerSide(broker, job_id, owner="t1", lease_s=LEASE_S)
    trainer.acquire()
    job = Job(broker, job_id, trainer)
    job.announce(0)
    with pytest.raises(FenceViolation, match="no_manifest"):
        trainer.open_iteration(job.opening(0), {0: "b" * 64})
    trainer.open_iteration(job.opening(0, 1), {0: DIGEST})
    job.announce(1)
    claim = job.generator().claim(LEASE_S)
    assert claim is not None
    job.generator().publish(claim, answer_to(claim.prompt_batch, "g1"))
    trained = {one.batch.batch_id: one.digest for one in trainer.claim_rollouts(0, max_batches=1)[0]}
    with pytest.raises(FenceViolation, match="no_manifest"):
        trainer.commit(record(0, trained), trained, event=None, opening=job.opening(1), made=(1, "b" * 64))
    assert trainer.fence().committed == -1
