"""A straggler against a real server: which generators may copy its batch, when, how often, and which copy counts.

Time is not slept: how long a batch is held, and how long others took, is written into the server's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.keys import JobKeys, item_fields
from broker.leases import FailOutcome, Renewal
from broker.ledger import LastClaim
from broker.monitor import job_status
from contracts.encoding.wire import decode
from contracts.settings import StackSettings
from tests.builders import commit_record
from tests.integration.fence_parts import let_expire, recent_times, set_claim_times, set_recent_times, set_typical_time
from tests.integration.test_fence import DIGEST, Job, answer_to, opened

LEASE_S = 600.0
TYPICAL_S = 100.0
STRAGGLER_BATCH = "0/train/1"
POLL_S = 60.0
"""Longer than the connection waits for an answer: a wait that is not cut short is an error."""


@dataclass
class Straggling:
    """Batch 0 is published, batch 1 is held by `slow`, and `quick` is idle."""

    job: Job
    keys: JobKeys
    slow: GeneratorSide
    quick: GeneratorSide
    held: Claim

    @property
    def broker(self) -> Broker:
        return self.job.broker

    def held_for(self, seconds: float) -> None:
        """Makes the straggler's claim this old."""
        claimed_ms = int((self.broker.now_s() - seconds) * 1000)
        set_claim_times(self.broker, self.keys, STRAGGLER_BATCH, claimed_ms=claimed_ms)

    def hedge(self, generator: GeneratorSide | None = None) -> Claim | None:
        return (generator or self.quick).claim(LEASE_S, hedge=True)

    def hedged(self, generator: GeneratorSide | None = None) -> Claim:
        self.held_for(10 * TYPICAL_S)
        claim = self.hedge(generator)
        assert claim is not None
        return claim

    def publish(self, name: str, claim: Claim) -> PublishOutcome:
        batch = answer_to(claim.prompt_batch, name, attempt=claim.attempt)
        return self.job.generator(name).publish(claim, batch)

    def counted(self) -> tuple[int, int, dict[str, int]]:
        """Hedges, those that won, refusals by reason."""
        status = job_status(self.broker, self.job.job_id)
        return status.batches_hedged, status.hedges_won, status.batches_rejected


def straggling(settings: StackSettings, **spec: object) -> Straggling:
    broker = connect(settings)
    job = opened(broker, rollout__max_attempts=2, **spec)
    slow, quick = job.generator("slow"), job.generator("quick")
    first, held = quick.claim(LEASE_S), slow.claim(LEASE_S)
    assert first is not None
    assert held is not None
    quick.publish(first, answer_to(first.prompt_batch, "quick"))
    set_typical_time(broker, broker.job_keys(job.job_id), TYPICAL_S)
    return Straggling(job=job, keys=broker.job_keys(job.job_id), slow=slow, quick=quick, held=held)


@pytest.fixture
def stack(settings: StackSettings) -> Straggling:
    return straggling(settings)


def test_an_idle_generator_takes_a_copy_once_the_batch_is_late_and_not_before(stack: Straggling) -> None:
    stack.held_for(1.4 * TYPICAL_S)
    assert stack.hedge() is None
    stack.held_for(1.6 * TYPICAL_S)
    copy = stack.hedge()
    assert copy is not None
    assert copy.hedged
    assert not stack.held.hedged
    assert copy.prompt_batch == stack.held.prompt_batch
    assert (copy.attempt, copy.manifest) == (stack.held.attempt, stack.held.manifest)
    assert stack.counted() == (1, 0, {})


def test_who_does_not_ask_for_a_copy_gets_none(stack: Straggling) -> None:
    stack.held_for(10 * TYPICAL_S)
    assert stack.quick.claim(LEASE_S) is None


@pytest.mark.parametrize(
    "spec", [{"rollout__hedge": False}, {"deterministic": False}], ids=["switched off", "copies would differ"]
)
def test_a_job_that_does_not_hedge_gives_no_copy(settings: StackSettings, spec: dict[str, object]) -> None:
    stack = straggling(settings, **spec)
    stack.held_for(10 * TYPICAL_S)
    assert stack.hedge() is None


def test_before_any_publication_nothing_is_late(stack: Straggling) -> None:
    stack.broker.redis.hdel(stack.keys.progress, "recent_ms")
    stack.held_for(10 * TYPICAL_S)
    assert stack.hedge() is None


def test_one_slow_publication_does_not_move_what_is_typical(stack: Straggling) -> None:
    set_recent_times(stack.broker, stack.keys, [100_000, 90_000, 9_000_000])
    stack.held_for(1.6 * TYPICAL_S)
    assert stack.hedge() is not None


def test_a_publication_is_timed_from_the_claim_of_who_published(stack: Straggling) -> None:
    copy = stack.hedged()
    set_claim_times(stack.broker, stack.keys, STRAGGLER_BATCH, hedged_ms=int((stack.broker.now_s() - 70) * 1000))
    stack.publish("quick", copy)
    newest_ms, before_ms = recent_times(stack.broker, stack.keys)
    assert (newest_ms // 10_000, before_ms) == (7, TYPICAL_S * 1000)


def test_a_batch_that_may_take_several_rounds_is_late_only_after_the_time_of_all(settings: StackSettings) -> None:
    stack = straggling(settings, rollout__max_resamples=3)
    stack.held_for(4 * 1.5 * TYPICAL_S - 5.0)
    assert stack.hedge() is None
    stack.held_for(4 * 1.5 * TYPICAL_S + 5.0)
    copy = stack.hedge()
    assert copy is not None
    set_claim_times(stack.broker, stack.keys, STRAGGLER_BATCH, hedged_ms=int((stack.broker.now_s() - 240) * 1000))
    batch = answer_to(copy.prompt_batch, "quick", attempt=copy.attempt)
    assert stack.quick.publish(copy, replace(batch, earlier_rounds=(batch.timings,) * 2)) is PublishOutcome.ACCEPTED
    assert recent_times(stack.broker, stack.keys)[0] // 1000 == 80, "of three rounds, each"


@pytest.mark.parametrize("oldest", [0, 1])
def test_of_several_late_batches_the_oldest_is_copied_first(stack: Straggling, oldest: int) -> None:
    assert stack.publish("slow", stack.held) is PublishOutcome.ACCEPTED
    trained = {one.batch.batch_id: one.digest for one in stack.job.trainer.claim_rollouts(0, max_batches=8)[0]}
    stack.job.announce(1)
    stack.job.trainer.commit(
        commit_record(0, trained), trained, event=None, opening=stack.job.opening(1, 2), next_version=(1, DIGEST)
    )
    for index in range(2):
        assert stack.slow.claim(LEASE_S)
        set_claim_times(stack.broker, stack.keys, f"1/train/{index}", claimed_ms=1 if index == oldest else 2)
    copies = [stack.hedge(), stack.hedge()]
    assert [copy and copy.prompt_batch.batch_id for copy in copies] == [f"1/train/{oldest}", f"1/train/{1 - oldest}"]


def test_a_batch_is_hedged_by_one_generator_only(stack: Straggling) -> None:
    stack.hedged()
    assert stack.hedge(stack.job.generator("third")) is None
    assert stack.hedge() is None


@pytest.mark.parametrize("quick_wins", [True, False])
def test_of_two_copies_one_is_accepted_and_one_is_a_duplicate(stack: Straggling, quick_wins: bool) -> None:
    copy = stack.hedged()
    copies = [("quick", copy), ("slow", stack.held)]
    first, second = copies if quick_wins else copies[::-1]
    assert stack.publish(*first) is PublishOutcome.ACCEPTED
    assert stack.publish(*second) is PublishOutcome.DUPLICATE
    assert stack.counted() == (1, int(quick_wins), {"duplicate": 1})
    assert stack.job.trainer.fence().published == 2
    assert stack.slow.renew([stack.held]) == Renewal(settled=(stack.held,))
    assert stack.quick.renew([copy]) == Renewal(settled=(copy,))


def test_the_heartbeat_of_a_hedge_leaves_the_lease_of_the_original_alone(stack: Straggling) -> None:
    copy = stack.hedged()
    let_expire(stack.broker, stack.keys, stack.held.prompt_batch.batch_id)
    assert stack.quick.renew([copy]) == Renewal()
    slot, named = stack.keys.slots[0], item_fields(0, stack.held.prompt_batch.batch_id, 0)
    claim: Any = stack.broker.redis.hget(slot.items, named.claim)
    assert decode(claim, LastClaim).worker == "slow"
    assert stack.broker.redis.zscore(slot.work, named.member) == 1, "as it was"


def test_a_failed_hedge_takes_no_attempt_away_and_is_not_repeated_at_once(stack: Straggling) -> None:
    copy = stack.hedged()
    assert stack.quick.fail(copy, "no reward") is FailOutcome.SETTLED
    assert stack.hedge() is None, "a hedger that fails must not spin"
    assert stack.slow.renew([stack.held]) == Renewal()
    assert stack.slow.fail(stack.held, "no reward") is FailOutcome.RETRIED
    again = stack.hedge()
    assert again is not None
    assert (again.attempt, again.hedged) == (2, False)


def test_a_batch_that_lost_a_holder_is_not_copied(stack: Straggling) -> None:
    let_expire(stack.broker, stack.keys, stack.held.prompt_batch.batch_id)
    again = stack.job.generator("third").claim(LEASE_S)
    assert again is not None
    assert again.attempt == 2
    stack.held_for(10 * TYPICAL_S)
    assert stack.hedge() is None


def test_a_hedger_that_takes_the_lease_over_holds_it_like_anybody(stack: Straggling) -> None:
    copy = stack.hedged()
    let_expire(stack.broker, stack.keys, stack.held.prompt_batch.batch_id)
    taken = stack.quick.claim(LEASE_S)
    assert taken is not None
    assert (taken.attempt, taken.hedged) == (2, False)
    assert stack.quick.fail(copy, "no reward") is FailOutcome.SETTLED, "the copy's failure is not the lease's"
    assert stack.publish("quick", taken) is PublishOutcome.ACCEPTED
    assert stack.counted() == (1, 0, {})


def test_an_idle_generator_waits_no_longer_than_until_the_batch_is_late(stack: Straggling) -> None:
    stack.held_for(1.5 * TYPICAL_S - 0.05)
    while (copy := stack.hedge()) is None:
        stack.quick.wait_for_prompts(POLL_S)
    assert copy.hedged


def test_a_batch_that_is_late_ends_one_wait_of_a_generator_that_claims_nothing(
    stack: Straggling, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.held_for(0.0)
    assert stack.hedge() is None
    timeouts_s: list[float] = []
    monkeypatch.setattr(stack.quick, "wait_for_wake", lambda timeout_s, *_: timeouts_s.append(timeout_s) or set())
    for _ in range(2):
        stack.quick.wait_for_prompts(LEASE_S)
    assert 0.0 < timeouts_s[0] < timeouts_s[1] == LEASE_S
