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
from tests.model import prompts as scripts
from tests.model.real import ATTEMPTS, GENERATORS, LONG_S, digest_text
from tests.model.server import NOBODY, NONE, VARIANTS, Entry, Server
from tests.model.server import Claim as ModelClaim

GENERATOR = st.integers(0, 2)
HEDGE_ENDS = ("wins", "loses", "goes on")
SAME_CONTENT = {"", "stale version", "future version", "past iteration", "future iteration"} | {
    "other weights",
    "unexpected",
}
"""Faults that leave what was sampled as it is."""
NO_ENTRY = -1
NEVER_MADE = VARIANTS - 2
"""The variant of a version that is named beside another one's digest."""
Place = tuple[int, int]
"""(iteration, batch)."""
Lease = tuple[int, str]
"""(iteration, entry): entries of two streams may have the same id."""


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
        self.entries: dict[Place, str] = {}
        """Batch → its entry on its stream, in the order of iterations and streams."""
        self.expired: set[Lease] = set()
        self.hedgers: dict[Lease, int] = {}
        """Entry → the generator that works on a copy."""
        self.numbers: dict[tuple[Lease, bool], int] = {}
        """Lease, and whether it is of a copy → the number of its newest claim."""
        self.num_dead = 0
        self.num_late = 0
        """Claims that were made to look old, each one younger than the last."""

    # Generators

    def _entry(self, place: Place) -> Entry:
        """The batch's entry on the stream, () where it isn't there."""
        opened = self.server.open_at(place[0])
        return self.server.slot_of(place[0]).batches[place[1]][1] if opened else ()

    def _lease(self, place: Place) -> Lease:
        return place[0], self.entries[place]

    def _next(self, who: int, held: int) -> tuple[Place, int] | None:
        """(the batch that a claim must get, the digest that samples it): in the oldest iteration that has one, the
        oldest expired lease, else the next new one (I5).

        What was tried too often is buried on the way.
        """
        for opened in self.server.window:
            while True:
                here = [one for one in self.entries if one[0] == opened.iteration and self._entry(one)]
                expired = [one for one in here if self._lease(one) in self.expired]
                fresh = [one for one in here if not self._entry(one)[2]]
                if not expired and not fresh:
                    break
                place = (expired or fresh)[0]
                entry = self._lease(place)
                self.counters["reclaimed"] += bool(expired)
                self.expired.discard(entry)
                outcome, self.server, claim = scripts.claim_prompt(
                    self.server, *place, who, MAX_ATTEMPTS, held=held, off=ALL_CHECKS
                )
                if outcome == "claimed":
                    if self.hedgers.get(entry) == who:
                        del self.hedgers[entry]
                    return place, claim[2]
                self._bury()
        return None

    def _bury(self) -> None:
        self.counters["dead"] += 1
        self.num_dead += 1

    @rule(who=GENERATOR, hedge=st.booleans(), back=st.integers(-1, 3))
    def claim(self, who: int, hedge: bool = False, back: int = 1) -> None:
        """back: how much older than the next version the weights are that the generator holds."""
        version = self.server.committed + 1 - back
        held = self.server.weights[version] if version >= 0 else NONE
        named = None if held == NONE else (version, digest_text(held))
        server = self.server
        claim, found = self.generators[who].claim(LONG_S, hedge=hedge, held=named), self._next(who, held)
        if found is None and claim is not None:
            assert hedge
            assert claim.hedged
            place = self._place_of(claim.prompt_batch.batch_id)
            self._check_hedge(who, place, claim)
            found = place, scripts.sampler(server, *place, held, ALL_CHECKS)
        assert (claim is None) == (found is None)
        if claim is not None and found is not None:
            place, digest = found
            entry = self._entry(place)
            assert claim.prompt_batch.batch_id == self.real.batch_id(*place)
            assert (claim.attempt, claim.entry_id) == (entry[1] + entry[2] - 1, self.entries[place])
            sampled_by = (claim.prompt_batch.policy_version, claim.prompt_batch.weights_digest)
            assert sampled_by == (digest // VARIANTS, digest_text(digest))
            assert claim.manifest.weights_digest == digest_text(digest)
            assert all(claim.number > made.claim.number for made in self.claims), "a number comes once, and grows"
            self.claims.append(Made(who, claim, *place, digest))
            self.numbers[self._lease(place), claim.hedged] = claim.number

    def _place_of(self, batch_id: str) -> Place:
        iteration, _, batch = batch_id.split("/")
        return int(iteration), int(batch)

    def _check_hedge(self, who: int, place: Place, claim: Claim) -> None:
        """A copy is of a batch of its first holder, another generator, and there is one of it."""
        _, _, deliveries, holder = self._entry(place)
        assert deliveries == 1
        assert holder not in (NOBODY, who)
        assert self._lease(place) == (place[0], claim.entry_id)
        assert self._lease(place) not in self.hedgers
        self.hedgers[self._lease(place)] = who
        self.counters["hedged"] += 1
        self.seen["hedged"] += 1

    def _in_model(self, made: Made) -> ModelClaim:
        """With the entry that the model knows; one that is gone is another than all that come."""
        entry_id = NO_ENTRY
        place = (made.iteration, made.batch)
        if self.entries.get(place) == made.claim.entry_id and self._entry(place) and self._is_newest(made):
            entry_id = self._entry(place)[0]
        return (made.iteration, made.batch, made.digest, entry_id, made.claim.attempt)

    def _is_newest(self, made: Made) -> bool:
        """Whether no claim of its lease came after it: a restart may forget one, and give its name to another."""
        lease = (made.iteration, made.claim.entry_id)
        return self.numbers.get((lease, made.claim.hedged)) == made.claim.number

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
        variant = digest % VARIANTS if version == digest // VARIANTS else NEVER_MADE
        digest = VARIANTS * version + (VARIANTS - 1 if fault == "other weights" else variant)
        batch = 9 if fault == "unexpected" or iteration != made.iteration else batch  # the id says its iteration
        return scripts.publish(
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
        place = (made.iteration, made.batch)
        return place in self.entries and self.hedgers.get(self._lease(place)) == made.who

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 3))
    def release(self, pick: int) -> None:
        self.fail(pick, is_released=True)

    @precondition(lambda self: self.claims)
    @rule(pick=st.integers(0, 3))
    def fail(self, pick: int, is_released: bool = False) -> None:
        made = self.claims[-1 - pick % len(self.claims)]
        claim, outcome = self._in_model(made), "settled"
        times = 2 if self.broker.loses_next_answer else 1
        side = self.generators[made.who]
        said = (side.release if is_released else side.fail)(made.claim, "no reward: timeout").value
        for _ in range(times if claim[3] != NO_ENTRY else 0):
            outcome, self.server = scripts.fail(
                self.server, claim, made.who, MAX_ATTEMPTS, ALL_CHECKS, is_released=is_released
            )
            self.seen[f"fail: {outcome}"] += 1
            self.counters["released" if is_released else "failed"] += outcome != "settled"
            if outcome == "dead":
                self._bury()
        assert said == outcome

    @rule(who=GENERATOR)
    def renew(self, who: int) -> None:
        held = [made for made in self.claims if made.who == who]
        renewal = self.generators[who].renew([made.claim for made in held])
        for made in held:
            lease = (made.iteration, made.claim.entry_id)
            state, _ = scripts.renew_prompt(self.server, self._in_model(made), who, ALL_CHECKS)
            is_there = self.entries.get((made.iteration, made.batch)) == made.claim.entry_id
            if state == "lost" and is_there and self._is_hedger(made) and self._is_newest(made) and made.claim.hedged:
                state = "held"
            found = (made.claim in renewal.lost, made.claim in renewal.settled)
            assert found == (state == "lost", state == "settled"), state
            self.seen[f"renew: {state}"] += 1
            if state == "held" and self.hedgers.get(lease) != who:
                self.expired.discard(lease)

    def _leased(self) -> list[Place]:
        return [place for place in self.entries if (entry := self._entry(place)) and entry[3] != NOBODY]

    @rule(pick=st.integers(0, 3), hedger=st.sampled_from([None, 0, 1, 2]), end=st.sampled_from(HEDGE_ENDS))
    def a_generator_is_late(self, pick: int, hedger: int | None, end: str) -> None:
        leased = self._leased()
        if leased:
            self.num_late += 1
            place = leased[pick % len(leased)]
            batch_id = self.real.batch_id(*place)
            set_ledger_times(self.broker, self.keys, batch_id, iteration=place[0], claimed_ms=self.num_late)
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
        for _ in range(NUM_BATCHES * (self.bounds.lag + 1) + 1):
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
            place = leased[pick % len(leased)]
            holder = f"g{self._entry(place)[3]}"
            let_expire(self.broker, self.keys, holder, self.entries[place], iteration=place[0])
            self.expired.add(self._lease(place))
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
        entries: dict[Place, str] = {}
        for opened in self.server.window:
            slot = held.slot_of(opened.iteration)
            there = {self._place_of(batch_id): entry for entry, batch_id, _ in slot.prompts}
            known = {place: entry for place, entry in self.entries.items() if place[0] == opened.iteration}
            entries |= {place: entry for place, entry in known.items() if place not in there} | there
        self.entries = entries
