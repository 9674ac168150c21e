"""Arbitrary interleavings of trainers and generators against a real server: I1-I5 hold after every step.

`fence_model.py` says what each call must answer, and what the server must hold afterwards. Time is not slept: leases
are made to expire in the server. `SOAK_EXAMPLES=2000` (`make soak`) explores that many examples at random.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from broker.connection.client import connect
from broker.generator_side import FailOutcome, PublishOutcome
from broker.job_store import JobStore
from broker.keys import GENERATOR_GROUP
from contracts.encoding.wire import encode
from contracts.jobs import JobState
from contracts.rollouts import batch_digest
from contracts.settings import StackSettings
from tests.integration.fence_checks import CHECKS, check_claims, read
from tests.integration.fence_model import Entry
from tests.integration.fence_parts import FAULTS, StutteringBroker, answer_to, set_ledger_times, set_typical_time
from tests.integration.fence_trainers import CURRENT, LONG_S, MAX_ATTEMPTS, NUM_BATCHES, TrainerMoves

SOAK = int(os.environ.get("SOAK_EXAMPLES", "0"))
"""Random examples to explore instead of the fixed few."""
PROFILE = hypothesis_settings(
    max_examples=SOAK or 80,
    stateful_step_count=100 if SOAK else 50,
    derandomize=not SOAK,
    phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
GENERATOR = st.integers(0, 2)
HEDGE_ENDS = ("wins", "loses", "goes on")
REACHED = {"fenced off", "commit: committed", "commit: refused", "rewind: rewound", "rewind: refused"} | {
    "fail: retried",
    "fail: dead",
    "reconcile: 1",
    "reclaimed",
    "hedged",
    "hedge: accepted",
    "hedge: duplicate",
    "renew: held",
    "renew: lost",
    "renew: settled",
}
"""Each must have happened in a run, beside every outcome of a publication."""


class FenceMachine(TrainerMoves):
    """Three trainers, three generators, one job, and a server that may forget its last writes."""

    # Generators

    @rule(who=GENERATOR, hedge=st.booleans())
    def claim(self, who: int, hedge: bool = False) -> None:
        self.broker.loses_next_answer = False  # a claim whose answer is lost is a generator that died
        claim, expected = self.generators[who].claim(LONG_S, hedge=hedge), self.model.claim(f"g{who}")
        is_hedge = hedge and expected is None
        if is_hedge:
            expected = self.model.hedge(f"g{who}")
        assert (claim is None) == (expected is None)
        if claim and expected:
            assert claim.hedged == is_hedge
            if is_hedge:
                self.seen["hedged"] += 1
            assert (claim.prompt_batch.batch_id, claim.attempt) == (expected.batch_id, expected.attempt)
            assert claim.entry_id == expected.entry_id
            assert claim.manifest.weights_digest == self.model.weights[self.model.version]
            self.claims.append((who, claim))

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 3))
    def publish(self, pick: int) -> None:
        self._publish(pick, "")

    @rule(who=GENERATOR, faults=st.permutations(sorted(FAULTS.keys() - {"resampled"})))
    def publish_what_is_wrong(self, who: int, faults: list[str]) -> None:
        self.claim(who)
        for fault in [*faults, "resampled"] if self.claims else ():
            self._publish(0, fault)

    @rule(who=GENERATOR)
    def claim_and_fail(self, who: int) -> None:
        for _ in range(MAX_ATTEMPTS + 1):
            self.claim(who)
            if self.claims:
                self.fail(0)
            self.the_server_holds_what_the_model_says()

    @rule(who=GENERATOR)
    def work(self, who: int) -> None:
        self.claim(who)
        if self.claims:
            self._publish(0, "")

    def _publish(self, pick: int, fault: str) -> None:
        """By the `pick`-th newest claim."""
        who, claim = self.claims[-1 - pick % len(self.claims)]
        batch = answer_to(claim, f"g{who}", fault)
        if fault == "unexpected":
            claim = replace(claim, prompt_batch=replace(claim.prompt_batch, batch_id=batch.batch_id))
        times = 2 if self.broker.loses_next_answer else 1
        outcome = self.generators[who].publish(claim, batch)
        digest, num_bytes = batch_digest(batch), len(encode(batch))
        expected = [self.model.publish(batch, digest=digest, num_bytes=num_bytes) for _ in range(times)][-1]
        assert outcome is expected
        self.seen[f"publish: {expected.value}"] += 1
        if claim.hedged:
            self.seen[f"hedge: {expected.value}"] += 1
        if self.model.knows_typical_time:
            set_typical_time(self.broker, self.keys, LONG_S)

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 3))
    def fail(self, pick: int) -> None:
        who, claim = self.claims[-1 - pick % len(self.claims)]
        stutters = self.broker.loses_next_answer
        outcome = self.generators[who].fail(claim, "no reward: timeout")
        expected = self.model.fail(claim.entry_id, f"g{who}", claim.attempt)
        assert outcome is (FailOutcome.SETTLED if stutters else expected)
        self.seen[f"fail: {expected.value}"] += 1

    @rule(who=GENERATOR)
    def renew(self, who: int) -> None:
        held = [claim for owner, claim in self.claims if owner == who]
        renewal = self.generators[who].renew(held)
        for claim in held:
            state = self.model.renew(claim.prompt_batch.batch_id, claim.entry_id, f"g{who}")
            assert (claim in renewal.lost, claim in renewal.settled) == (state == "lost", state == "settled")
            self.seen[f"renew: {state}"] += 1

    @rule(pick=st.integers(0, 3), hedger=st.sampled_from([None, 0, 1, 2]), end=st.sampled_from(HEDGE_ENDS))
    def a_generator_is_late(self, pick: int, hedger: int | None, end: str) -> None:
        leased = [entry for entry in self.model.entries if entry.generator]
        if leased:
            entry = leased[pick % len(leased)]
            self.num_late += 1
            entry.late_since = self.num_late
            set_ledger_times(self.broker, self.keys, entry.batch_id, claimed_ms=self.num_late)
        if hedger is None:
            return
        self.model.knows_typical_time = True
        set_typical_time(self.broker, self.keys, LONG_S)
        before = self.model.counters["hedged"]
        self.claim(hedger, hedge=True)
        if self.model.counters["hedged"] > before:
            self._end_hedge(hedger, self.claims[-1][1].entry_id, end)

    @rule(who=GENERATOR, hedger=GENERATOR, end=st.sampled_from(HEDGE_ENDS))
    def a_race(self, who: int, hedger: int, end: str) -> None:
        """Everything is claimed, one batch is late, and somebody is idle."""
        for _ in range(NUM_BATCHES + 1):
            self.claim(who)
            self.the_server_holds_what_the_model_says()
        self.a_generator_is_late(0, hedger, end)

    def _end_hedge(self, hedger: int, entry_id: str, end: str) -> None:
        entry = next(entry for entry in self.model.entries if entry.entry_id == entry_id)
        self.renew(hedger)
        if end == "loses":
            holders = [(claim.entry_id, f"g{who}", claim.attempt) for who, claim in reversed(self.claims)]
            if (entry_id, entry.generator, entry.attempt) in holders:
                self._publish(holders.index((entry_id, entry.generator, entry.attempt)), "")
        if end in ("loses", "wins"):
            self._publish(0, "")
            self.renew(hedger)

    @rule(pick=st.integers(0, 3), successor=st.sampled_from([None, 0, 1, 2]))
    def prompt_lease_expires(self, pick: int, successor: int | None) -> None:
        leased = [entry for entry in self.model.entries if entry.generator]
        if leased:
            entry = leased[pick % len(leased)]
            self._xclaim_as_idle(entry)
            entry.is_expired = True
        if successor is not None:
            before = self.model.counters["reclaimed"]
            self.claim(successor)
            if self.model.counters["reclaimed"] > before:
                self.seen["reclaimed"] += 1

    @rule(who=GENERATOR, successor=GENERATOR)
    def a_generator_sleeps_past_its_lease(self, who: int, successor: int) -> None:
        """It claims, another takes over, and it wakes up."""
        self.claim(who)
        self.the_server_holds_what_the_model_says()
        self.prompt_lease_expires(0, successor)
        self.renew(who)

    def _xclaim_as_idle(self, entry: Entry) -> None:
        self.broker.redis.xclaim(
            self.keys.prompts,
            GENERATOR_GROUP,
            entry.generator,
            0,
            [entry.entry_id],
            idle=int(2000 * LONG_S),
            justid=True,
        )

    # The server

    @rule(what=st.sampled_from(["answer", "scripts"]))
    def the_server_forgets(self, what: str) -> None:
        if what == "answer":
            self.broker.loses_next_answer = True
        else:
            self.broker.redis.script_flush()

    @rule(pick=st.integers(0, 3), is_noticed=st.booleans())
    def a_prompt_is_lost(self, pick: int, is_noticed: bool) -> None:
        if self.model.entries:
            entry = self.model.entries.pop(pick % len(self.model.entries))
            self.broker.redis.xack(self.keys.prompts, GENERATOR_GROUP, entry.entry_id)
            self.broker.redis.xdel(self.keys.prompts, entry.entry_id)
        if is_noticed:
            self.reconcile(CURRENT, False)

    @rule()
    def writes_reach_the_disk(self) -> None:
        rows = {key: self.broker.redis.dump(key) for key in self.keys.script_keys}
        self.disk = (
            {key: value for key, value in rows.items() if value},
            copy.deepcopy(self.model),
            self.num_beginnings,
        )  # type: ignore[misc]

    @precondition(lambda self: self.disk)
    @rule()
    def the_last_writes_are_lost(self) -> None:
        """What clients were told stays told; a restart takes longer than the milliseconds that epochs ran ahead."""
        assert self.disk
        last_ms = max(self.newest_epoch, self._server_ms())
        while self._server_ms() <= last_ms:
            pass
        rows, model, num_beginnings = self.disk
        self.model = copy.deepcopy(model)
        with self.broker.redis.pipeline(transaction=True) as pipe:
            for key in self.keys.script_keys:
                pipe.delete(key)
                if key in rows:
                    pipe.restore(key, 0, rows[key])
            pipe.execute()
        if num_beginnings != self.num_beginnings:
            self.num_beginnings = num_beginnings
            self._restart_trainers()  # as each does that finds the fence at another iteration than its own

    @rule(before=st.integers(0, 2), after=st.integers(0, 2))
    def a_takeover_is_lost(self, before: int, after: int) -> None:
        """The next epoch must be newer than the one that the server has forgotten."""
        for who in (before, after):
            self.writes_reach_the_disk()
            self.trainer_lease(CURRENT, "release")
            self.acquire(who)
            self.the_last_writes_are_lost()
            self.trainer_lease(CURRENT, "expire")

    def _server_ms(self) -> int:
        seconds, micros = self.broker.redis.time()  # type: ignore[misc]
        return seconds * 1000 + micros // 1000

    @rule(who=GENERATOR, variant=st.integers(0, 1), opens=st.sampled_from([None, 1]))
    def beat(self, who: int, variant: int, opens: int | None) -> None:
        """The open iteration, or the next one, from its first claim to its commit, and a generator that comes late."""
        version = self.model.committed + 1
        steps: list[Callable[[], None]] = [
            lambda: self.publish_weights(CURRENT, 0, variant),
            lambda: self.open(CURRENT, 1),
            *[lambda: self.work(who)] * len(self.model.entries or range(NUM_BATCHES)),
            lambda: self.claim_rollouts(CURRENT, 2 * NUM_BATCHES, waits=variant == 1, is_lost=opens is None),
            lambda: self.publish_weights(CURRENT, 1, variant),
            lambda: self.commit(CURRENT, "right", opens, False),
            lambda: self._publish(0, "resampled") if self.claims else None,
        ]
        for step in steps:
            step()
            self.the_server_holds_what_the_model_says()
        self.seen[f"beat: {'committed' if self.model.committed == version else 'stuck'}"] += 1

    def teardown(self) -> None:
        JobStore(self.broker).move(self.job_id, JobState.CANCELLED)
        self.broker.redis.delete(*self.keys.script_keys)

    @invariant()
    def the_server_holds_what_the_model_says(self) -> None:
        held = read(self.broker, self.keys)
        for check in CHECKS:
            check(held, self.model)
        check_claims(held)


@pytest.mark.timeout(3600 if SOAK else 180)
def test_the_fence_keeps_its_invariants_whatever_the_order_of_calls(settings: StackSettings) -> None:
    FenceMachine.broker = StutteringBroker(connect(settings).redis)
    FenceMachine.seen = Counter()
    run_state_machine_as_test(FenceMachine, settings=PROFILE)
    of_an_active_job = set(PublishOutcome) - {PublishOutcome.ENDED}  # test_ended_jobs.py
    assert {f"publish: {outcome.value}" for outcome in of_an_active_job} - FenceMachine.seen.keys() == set()
    assert REACHED - FenceMachine.seen.keys() == set()
