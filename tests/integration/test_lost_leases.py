"""A job's counters show that a generator died while it held a batch, however the batch went on, and only then.

Time is not slept: when a lease ends is written into the server's state.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.monitor import job_status
from contracts.jobs import JobState
from contracts.settings import StackSettings
from gateway.metrics.stream_report import stream_report
from tests.builders import commit_record
from tests.integration.fence_parts import let_expire
from tests.integration.test_hedging import LEASE_S, STRAGGLER_BATCH, Straggling, straggling


@pytest.fixture
def stack(settings: StackSettings) -> Straggling:
    """`slow` holds a batch, and isn't heard of unless a test says so."""
    return straggling(settings)


def lost(stack: Straggling) -> int:
    """As the job's status and the report on its streams say it."""
    job_id = stack.job.job_id
    told = {job_status(stack.broker, job_id).leases_lost, stream_report(stack.broker, job_id).leases_lost}
    assert len(told) == 1
    return told.pop()


def lease_runs_out(stack: Straggling) -> None:
    """Moves the ends of the leases whose holders are missing into the past."""
    missing: dict[bytes, float] = dict(stack.broker.redis.zrange(stack.keys.missing, 0, -1, withscores=True))  # type: ignore[arg-type]
    for claim in missing:
        stack.broker.redis.zadd(stack.keys.missing, {claim: 1.0})


def overtaken(stack: Straggling) -> None:
    """A copy of the batch is published before the lease of its holder has run out."""
    assert stack.publish("quick", stack.hedged()) is PublishOutcome.ACCEPTED


def begun_again(stack: Straggling) -> None:
    """A trainer rewinds to before the iteration."""
    stack.job.trainer.rewind(commit_record(0, {}))


def cancelled(stack: Straggling) -> None:
    JobStore(stack.broker).request_cancel(stack.job.job_id)
    JobStore(stack.broker).move(stack.job.job_id, JobState.CANCELLED)


WAYS = [overtaken, begun_again, cancelled]


@pytest.mark.parametrize("passes_over", WAYS)
def test_a_holder_that_is_not_heard_of_until_its_lease_ends_has_died(
    stack: Straggling, passes_over: Callable[[Straggling], None]
) -> None:
    passes_over(stack)
    assert lost(stack) == 0, "its lease has not run out: it may live"
    lease_runs_out(stack)
    assert lost(stack) == 1
    assert lost(stack) == 1


def test_a_lease_that_ran_out_and_went_to_another_is_lost_as_well(stack: Straggling) -> None:
    let_expire(stack.broker, stack.keys, STRAGGLER_BATCH)
    claim = stack.quick.claim(LEASE_S)
    assert claim is not None
    status = job_status(stack.broker, stack.job.job_id)
    assert (status.batches_reclaimed, status.leases_lost) == (1, 1)
    assert stack.publish("quick", claim) is PublishOutcome.ACCEPTED
    lease_runs_out(stack)
    assert lost(stack) == 1, "it counts once"


def renews(slow: GeneratorSide, claim: Claim, stack: Straggling) -> None:
    assert slow.renew([claim]).settled == (claim,)


def publishes(slow: GeneratorSide, claim: Claim, stack: Straggling) -> None:
    assert stack.publish("slow", claim) is not PublishOutcome.ACCEPTED


def gives_back(slow: GeneratorSide, claim: Claim, stack: Straggling) -> None:
    slow.fail(claim, "no room")


@pytest.mark.parametrize("says", [renews, publishes, gives_back])
@pytest.mark.parametrize("passes_over", WAYS)
def test_a_holder_that_says_anything_of_its_claim_lives(
    stack: Straggling,
    passes_over: Callable[[Straggling], None],
    says: Callable[[GeneratorSide, Claim, Straggling], None],
) -> None:
    passes_over(stack)
    says(stack.slow, stack.held, stack)
    lease_runs_out(stack)
    assert lost(stack) == 0


def test_one_that_publishes_what_it_holds_is_not_missed(stack: Straggling) -> None:
    assert stack.publish("slow", stack.held) is PublishOutcome.ACCEPTED
    assert stack.broker.redis.zcard(stack.keys.missing) == 0
    assert lost(stack) == 0


def test_what_has_died_is_counted_for_good_when_the_next_holder_is_missed(stack: Straggling) -> None:
    """The set of those that are missed does not grow with each death."""
    stack.broker.redis.zadd(stack.keys.missing, {f"{number}": 1.0 for number in range(1, 2001)})
    assert lost(stack) == 1000, "as many are looked at"
    overtaken(stack)
    assert stack.broker.redis.zcard(stack.keys.missing) == 1
    assert lost(stack) == 2000
