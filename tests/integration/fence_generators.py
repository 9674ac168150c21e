"""The generators' moves of test_fence_properties.py: each call goes to the server and to the model (tests/model)."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from msgspec.structs import replace

from broker.generator_side import Claim
from contracts.encoding.wire import encode
from tests.integration.fence_checks import Held
from tests.integration.fence_parts import FAULTS, let_expire, set_ledger_times, set_typical_time
from tests.integration.fence_trainers import ALL_CHECKS, CURRENT, MAX_ATTEMPTS, NUM_BATCHES, TrainerMoves
from tests.model import fence
from tests.model.fence import NOBODY, VARIANTS, Server
from tests.model.real import ATTEMPTS, GENERATORS, LONG_S, digest_text

GENERATOR = st.integers(0, 2)
HEDGE_ENDS = ("wins", "loses", "goes on")
SAME_CONTENT = {"", "stale version", "future version", "past iteration", "future iteration"} | {
    "other weights",
    "unexpected",
}
"""Faults that leave what was sampled as it is."""
NO_ENTRY = -1


class Made(NamedTuple):
    """A claim that was answered, and what it is in the model."""

    who: int
    claim: Claim
    iteration: int
    batch: int
    digest: int


class GeneratorMoves(TrainerMoves):
    """Three generators that work on the job of the three trainers."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: list[Made] = []
        """Every claim that was ever answered: the late come back at any time."""
        self.entries: dict[int, str] = {}
        """Batch → its entry on the stream, in the stream's order."""
        self.expired: set[str] = set()
        self.hedgers: dict[str, int] = {}
        """Entry → the generator that works on a copy."""
        self.num_dead = 0
        self.num_late = 0
        """Claims that were made to look old, each one younger than the last."""

    # Generators

    def _next(self, who: int) -> int | None:
        """The batch that a claim must get: the oldest expired lease, else the next new one (I5).

        What was tried too often is buried on the way.
        """
        while self.server.is_open:
            here = self.server.batches
            expired = [batch for batch, entry in self.entries.items() if here[batch][1] and entry in self.expired]
            fresh = [batch for batch in self.entries if here[batch][1] and not here[batch][1][2]]
            if not expired and not fresh:
                return None
            batch = (expired or fresh)[0]
            entry = self.entries[batch]
            self.counters["reclaimed"] += bool(expired)
            self.expired.discard(entry)
            outcome, self.server, _ = fence.claim_prompt(self.server, batch, who, MAX_ATTEMPTS)
            if outcome == "claimed":
                if self.hedgers.get(entry) == who:
                    del self.hedgers[entry]
                return batch
            self._bury()
        return None

    def _bury(self) -> None:
        self.counters["dead"] += 1
        self.num_dead += 1

    @rule(who=GENERATOR, hedge=st.booleans())
    def claim(self, who: int, hedge: bool = False) -> None:
        self.broker.loses_next_answer = False  # a claim whose answer is lost is a generator that died
        claim, batch = self.generators[who].claim(LONG_S, hedge=hedge), self._next(who)
        if batch is None and claim is not None:
            assert hedge
            assert claim.hedged
            batch = int(claim.prompt_batch.batch_id.rpartition("/")[2])
            self._check_hedge(who, batch, claim)
        assert (claim is None) == (batch is None)
        if claim is not None and batch is not None:
            entry = self.server.batches[batch][1]
            assert claim.prompt_batch.batch_id == f"{self.server.iteration}/train/{batch}"
            assert (claim.attempt, claim.entry_id) == (entry[1] + entry[2] - 1, self.entries[batch])
            digest = self.server.weights[self.server.iteration]
            assert claim.manifest.weights_digest == digest_text(digest)
            self.claims.append(Made(who, claim, self.server.iteration, batch, digest))

    def _check_hedge(self, who: int, batch: int, claim: Claim) -> None:
        """A copy is of a batch of its first holder, another generator, and there is one of it."""
        _, _, deliveries, holder = self.server.batches[batch][1]
        assert deliveries == 1
        assert holder not in (NOBODY, who)
        assert claim.entry_id not in self.hedgers
        self.hedgers[claim.entry_id] = who
        self.counters["hedged"] += 1
        self.seen["hedged"] += 1

    def _in_model(self, made: Made) -> fence.Claim:
        """With the entry that the model knows; one that is gone is another than all that come."""
        entry_id = NO_ENTRY
        if made.iteration == self.server.iteration and self.entries.get(made.batch) == made.claim.entry_id:
            entry = self.server.batches[made.batch][1]
            entry_id = entry[0] if entry else NO_ENTRY
        return (made.iteration, made.batch, made.digest, entry_id, made.claim.attempt)

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
        made = self.claims[-1 - pick % len(self.claims)]
        content = made.who + GENERATORS * made.claim.attempt
        content += 0 if fault in SAME_CONTENT else GENERATORS * ATTEMPTS * (1 + sorted(FAULTS).index(fault))
        prompts = made.claim.prompt_batch
        changes = FAULTS[fault](prompts) if fault else {}
        batch = self.real.rollouts(
            made.iteration, made.batch, content=content, digest=made.digest, **{**changes, "seed": content}
        )
        claim = replace(made.claim, prompt_batch=replace(prompts, batch_id=batch.batch_id))
        self.num_rollouts += 1
        before, times = self.server, 2 if self.broker.loses_next_answer else 1
        outcome = self.generators[made.who].publish(claim, batch)
        for _ in range(times):
            expected, after = self._published(made, batch.iteration, batch.policy_version, content, fault)
            if expected != "accepted":
                self.counters[f"rejected:{expected}"] += 1
            elif after != self.server:
                self._accepted(made, len(encode(batch)))
            self.server = after
        assert outcome.value == expected
        self.seen[f"publish: {expected}"] += 1
        if (claim.hedged and before != self.server) or (claim.hedged and expected == "duplicate"):
            self.seen[f"hedge: {expected}"] += 1
        if self.broker.redis.hexists(self.keys.progress, "recent_ms"):
            set_typical_time(self.broker, self.keys, LONG_S)

    def _published(self, made: Made, iteration: int, version: int, content: int, fault: str) -> tuple[str, Server]:
        _, batch, digest, entry_id, attempt = self._in_model(made)
        digest = VARIANTS * version + (VARIANTS - 1 if fault == "other weights" else digest % VARIANTS)
        batch = 9 if fault == "unexpected" else batch
        return fence.publish(
            self.server,
            (iteration, batch, digest, entry_id, attempt),
            made.who,
            content,
            is_complete=fault not in ("incomplete", "misshapen"),
            fits=fault != "oversize",
            rollout_id=self.num_rollouts,
            off=ALL_CHECKS,
        )

    def _accepted(self, made: Made, num_bytes: int) -> None:
        self.counters["accepted"] += 1
        self.counters["accepted_bytes"] += num_bytes
        self.counters["hedges_won"] += self._is_hedger(made)

    def _is_hedger(self, made: Made) -> bool:
        """Whether it works on a copy of the batch as it stands on the stream, or stood when it was lost there."""
        return self.hedgers.get(self.entries.get(made.batch, "")) == made.who

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 3))
    def fail(self, pick: int) -> None:
        made = self.claims[-1 - pick % len(self.claims)]
        claim, outcome = self._in_model(made), "settled"
        times = 2 if self.broker.loses_next_answer else 1
        said = self.generators[made.who].fail(made.claim, "no reward: timeout").value
        for _ in range(times if claim[3] != NO_ENTRY else 0):
            outcome, self.server = fence.fail(self.server, claim, made.who, MAX_ATTEMPTS, ALL_CHECKS)
            self.seen[f"fail: {outcome}"] += 1
            self.counters["failed"] += outcome != "settled"
            if outcome == "dead":
                self._bury()
        assert said == outcome

    @rule(who=GENERATOR)
    def renew(self, who: int) -> None:
        held = [made for made in self.claims if made.who == who]
        renewal = self.generators[who].renew([made.claim for made in held])
        for made in held:
            state, _ = fence.renew_prompt(self.server, self._in_model(made), who, ALL_CHECKS)
            is_there = self.entries.get(made.batch) == made.claim.entry_id
            if state == "lost" and is_there and self._is_hedger(made):
                state = "held"
            found = (made.claim in renewal.lost, made.claim in renewal.settled)
            assert found == (state == "lost", state == "settled"), state
            self.seen[f"renew: {state}"] += 1
            if state == "held" and self.hedgers.get(made.claim.entry_id) != who:
                self.expired.discard(made.claim.entry_id)

    def _leased(self) -> list[int]:
        return [batch for batch in self.entries if (entry := self.server.batches[batch][1]) and entry[3] != NOBODY]

    @rule(pick=st.integers(0, 3), hedger=st.sampled_from([None, 0, 1, 2]), end=st.sampled_from(HEDGE_ENDS))
    def a_generator_is_late(self, pick: int, hedger: int | None, end: str) -> None:
        leased = self._leased()
        if leased:
            self.num_late += 1
            batch_id = f"{self.server.iteration}/train/{leased[pick % len(leased)]}"
            set_ledger_times(self.broker, self.keys, batch_id, claimed_ms=self.num_late)
        if hedger is None:
            return
        set_typical_time(self.broker, self.keys, LONG_S)
        before = self.counters["hedged"]
        self.claim(hedger, hedge=True)
        if self.counters["hedged"] > before:
            self._end_hedge(hedger, end)

    @rule(who=GENERATOR, end=st.sampled_from(HEDGE_ENDS))
    def a_race(self, who: int, end: str) -> None:
        """Everything is claimed, one batch is late, and another generator is idle."""
        self.publish_weights(CURRENT, 0, 0)
        self.open(CURRENT, 1)
        self.the_server_holds_what_the_model_says()
        for _ in range(NUM_BATCHES + 1):
            self.claim(who)
            self.the_server_holds_what_the_model_says()
        self.a_generator_is_late(0, (who + 1) % 3, end)

    def _end_hedge(self, hedger: int, end: str) -> None:
        copy = self.claims[-1]
        self.renew(hedger)
        holders = [made for made in self.claims if made.claim.entry_id == copy.claim.entry_id and made is not copy]
        if end == "loses" and holders:
            self._publish(len(self.claims) - 1 - self.claims.index(holders[-1]), "")
        if end in ("loses", "wins"):
            self._publish(0, "")
            self.renew(hedger)

    @rule(pick=st.integers(0, 3), successor=st.sampled_from([None, 0, 1, 2]))
    def prompt_lease_expires(self, pick: int, successor: int | None) -> None:
        leased = self._leased()
        if leased:
            batch = leased[pick % len(leased)]
            let_expire(self.broker, self.keys, f"g{self.server.batches[batch][1][3]}", self.entries[batch])
            self.expired.add(self.entries[batch])
        if successor is not None:
            before = self.counters["reclaimed"]
            self.claim(successor)
            self.seen["reclaimed"] += self.counters["reclaimed"] > before

    @rule(who=GENERATOR, successor=GENERATOR)
    def a_generator_sleeps_past_its_lease(self, who: int, successor: int) -> None:
        """It claims, another takes over, and it wakes up."""
        self.claim(who)
        self.the_server_holds_what_the_model_says()
        self.prompt_lease_expires(0, successor)
        self.renew(who)

    @invariant()
    def the_server_holds_what_the_model_says(self) -> None:
        held = self.real.check(self.server)
        self._learn_entries(held)
        assert held.counters == {name: number for name, number in self.counters.items() if number}
        assert len(held.dead) == self.num_dead

    def _learn_entries(self, held: Held) -> None:
        """A lost prompt's entry stays known: its claims come late."""
        there = {int(batch_id.rpartition("/")[2]): entry for entry, batch_id, _ in held.prompts}
        gone = {} if not held.ledger else {batch: entry for batch, entry in self.entries.items() if batch not in there}
        self.entries = {**gone, **there}
