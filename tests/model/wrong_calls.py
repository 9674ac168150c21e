"""Calls that a walk makes beside its moves: wrong ones, late ones and repeats, which the model says change nothing.

A row of a table is what is wrong with a call. Whether the script refuses it, and by which word, is what the model's
function says; the real call must say the same, and leave the server as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from redis.exceptions import ResponseError

from broker.connection.bounds import MAX_LEASES
from broker.connection.client import Broker
from broker.connection.script_texts import function_name
from broker.generator_side import Claim, GeneratorSide
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode
from tests.integration.fence_parts import set_claim_times, set_typical_time
from tests.model import fence, table
from tests.model.invariants import holds
from tests.model.real import ATTEMPTS, GENERATORS, LONG_S, MAX_BATCH_BYTES, RealFence, digest_text, numbers_of
from tests.model.server import ANY, COMMIT, FREE, LEASED, NONE, REWIND, VARIANTS, Record, Server
from tests.model.server import Claim as ModelClaim
from tests.model.state import Bounds, State

NO_RECORD: Record = (0, 0, 0)
NO_NUMBER = -1
OTHER = 9
"""A batch that no iteration has."""
ANEW = GENERATORS * ATTEMPTS
"""Added to a content, it is another one by the same generator at the same attempt."""
GRANTED = "granted"
OFF: frozenset[str] = frozenset()
Answer = tuple[str, Server]


class WrongCall(NamedTuple):
    name: str
    model: Callable[[Server], Answer]
    real: Callable[[], Any]
    """Its refusal as a text, which has the model's word in it; anything else is no refusal."""
    words: tuple[str, ...] = ()
    """Other words of the model that stand for what the real side answers without a refusal."""


class Publication(NamedTuple):
    """What a generator publishes under a claim, in the model's terms; `fields` are the real batch's."""

    iteration: int
    batch: int
    version: int
    variant: int
    content: int
    is_complete: bool = True
    fits: bool = True
    fields: Mapping[str, Any] = {}


FAULTS: Mapping[str, Callable[[Publication], Publication]] = {
    "publishes again": lambda one: one,
    "publishes anew": lambda one: one._replace(content=one.content + ANEW),
    "publishes an older version's": lambda one: one._replace(version=one.version - 1),
    "publishes a newer version's": lambda one: one._replace(version=one.version + 1),
    "publishes other weights'": lambda one: one._replace(variant=VARIANTS - 1),
    "publishes into the iteration before": lambda one: one._replace(iteration=one.iteration - 1, batch=OTHER),
    "publishes into the iteration after": lambda one: one._replace(iteration=one.iteration + 1, batch=OTHER),
    "publishes a part": lambda one: one._replace(
        is_complete=False, content=one.content + ANEW, fields={"num_groups": 2}
    ),
    "publishes other groups": lambda one: one._replace(
        is_complete=False, content=one.content + ANEW, fields={"num_groups": 2, "group_size": 3}
    ),
    "publishes a batch that is none": lambda one: one._replace(
        batch=OTHER, fields={"batch_id": f"{one.iteration}/train/{OTHER}"}
    ),
    "publishes too much": lambda one: one._replace(
        fits=False, content=one.content + ANEW, fields={"response_tokens": (MAX_BATCH_BYTES // 8,) * 2}
    ),
}
"""What is wrong with a publication → how it differs from the right one."""


COMMITS = (
    *("right", "lacks one", "of other content", "of one more"),
    *("after another record", "opens too far", "of other weights"),
)


class Late(NamedTuple):
    """A claim that was answered; its generator may come back with it at any time."""

    who: int
    claim: Claim
    model: ModelClaim


class Others:
    """The trainers and generators that a walk has seen, those of the past too."""

    def __init__(self, broker: Broker, real: RealFence, bounds: Bounds, random: Random) -> None:
        self._broker, self._real, self._bounds, self._random = broker, real, bounds, random
        self.trainers: list[tuple[int, TrainerSide]] = []
        """(epoch, side), oldest first."""
        self.claims: list[Late] = []
        self.newest: dict[tuple[int, int], int] = {}
        """(iteration, batch) → the number of its newest lease, as the server knows it."""
        real.links[NO_RECORD] = "f" * 64

    def of_trainer(self, state: State) -> WrongCall | None:
        if not self.trainers:
            return None
        epoch, side = self._random.choice(self.trainers[-4:])
        makes: tuple[Callable[[State, int, TrainerSide], WrongCall | None], ...] = (
            self._acquires,
            self._renews,
            self._announces,
            self._opens,
            self._opens,
            self._asks_for_rollouts,
            self._reconciles,
            self._dispatches,
            self._commits,
            self._commits,
            self._rewinds,
        )
        return self._random.choice(makes)(state, epoch, side)

    def of_generator(self, state: State, sides: list[GeneratorSide]) -> WrongCall | None:
        if not self.claims or self._random.random() < 0.2:
            return self._asks_in_vain(state, sides)
        late = self._random.choice(self.claims[-8:])
        if self._bounds.proves and self._random.random() < 0.2:
            return self._proves(state, sides, late)
        makes = (self._publishes, self._publishes, self._gives_back, self._renews_its_leases)
        return self._random.choice(makes)(state, sides, late)

    # Trainers

    def _acquires(self, state: State, _epoch: int, _side: TrainerSide) -> WrongCall | None:
        lease_until = self._broker.redis.hget(self._real.keys.fence, "lease_until")
        if float(lease_until or 0) < 1000 * (self._broker.now_s() + LONG_S / 2):  # type: ignore[arg-type]
            return None
        side = self._real.trainer("another one")
        return WrongCall("acquires a held job", lambda server: ("refused", server), side.acquire)

    def _renews(self, state: State, epoch: int, side: TrainerSide) -> WrongCall:
        outcome = GRANTED if epoch == state.server.epoch else "fenced"
        return WrongCall("renews", lambda server: (outcome, server), lambda: side.renew() and None, (GRANTED,))

    def _announces(self, state: State, epoch: int, side: TrainerSide) -> WrongCall:
        version = min(state.server.committed + self._random.choice((1, 1, 2)), self._bounds.iterations)
        digest = self._announced(state.server, version) + self._random.choice((0, 0, 1))
        return WrongCall(
            "announces",
            lambda server: fence.publish_weights(server, epoch, digest, oldest_kept=0, off=OFF),
            lambda: side.publish_weights(self._real.manifest(digest), oldest_kept=0),
            ("published",),
        )

    def _announced(self, server: Server, version: int) -> int:
        """The digest of this version; of one that is not announced, one that could have been."""
        digest = server.weights[version]
        return VARIANTS * version if digest == NONE else digest

    def _opens(self, state: State, epoch: int, side: TrainerSide) -> WrongCall:
        server, lag, draw = state.server, self._bounds.lag, self._random.choice
        newest_made = min(server.committed + 1, self._bounds.iterations)
        opening = self._bounds.opening(max(0, server.newest + draw((0, 1, 1, 2))), newest_made)
        older = draw((0, 0, 0, 1))
        oldest = max(0, opening.oldest - older)
        opening = opening._replace(oldest=oldest, newest=max(oldest, opening.newest - older))
        digests = tuple(self._announced(server, one) for one in range(max(0, newest_made - lag), newest_made + 1))
        digests = draw((digests, digests, digests[:-1], (), (*digests[:-1], digests[-1] + 1)))
        named = {digest // VARIANTS: digest_text(digest) for digest in digests}
        return WrongCall(
            "opens",
            lambda server: fence.open_iteration(server, epoch, opening, digests, OFF),
            lambda: side.open_iteration(self._real.opening(opening), named),
            ("already_open",),
        )

    def _asks_for_rollouts(self, state: State, epoch: int, side: TrainerSide) -> WrongCall | None:
        iteration = max(0, self._random.choice((state.server.committed, state.server.newest + 1)))

        def model(server: Server) -> Answer:
            return fence.claim_rollouts(server, epoch, iteration, 0, OFF)[:2]

        if model(state.server)[0] == "claimed":
            return None
        return WrongCall("claims rollouts", model, lambda: side.claim_rollouts(iteration, max_batches=8))

    def _reconciles(self, state: State, epoch: int, side: TrainerSide) -> WrongCall:
        iteration = max(0, state.server.committed + self._random.choice((0, 1, 1, 2)))
        sent = self._bounds.sent(iteration, state.server.committed + 1)
        return WrongCall(
            "reconciles",
            lambda server: fence.reconcile(server, epoch, iteration, sent, OFF),
            lambda: side.reconcile(iteration, self._real.batches(iteration, sent)),
            ("dispatched",),
        )

    def _dispatches(self, state: State, epoch: int, side: TrainerSide) -> WrongCall | None:
        iteration = max(0, state.server.committed + self._random.choice((0, 1, 2)))
        sent = tuple(one for one in self._bounds.sent(iteration, iteration) if one[1] != NONE)
        if not sent or iteration > self._bounds.iterations:
            return None
        return WrongCall(
            "dispatches",
            lambda server: fence.reconcile(server, epoch, iteration, sent, OFF),
            lambda: side.dispatch(iteration, self._real.batches(iteration, sent)),
            ("dispatched",),
        )

    def _commits(self, state: State, epoch: int, side: TrainerSide) -> WrongCall | None:
        server, bounds, draw = state.server, self._bounds, self._random.choice
        iteration = max(0, server.committed + draw((0, 1, 1, 1, 2)))
        engine = next((one.engine for one in state.trainers if one and one.epoch == epoch), NONE)
        if iteration > bounds.last_iteration or (bounds.kinds > 1 and engine == NONE):
            return None
        trained, is_settled = self._trained(server, iteration)
        what = draw(COMMITS)
        there = [batch for batch, one in enumerate(trained) if one[0] != NONE]
        if what in ("lacks one", "of other content") and not (there and is_settled):
            return None  # one thing at a time is wrong: which of two is said, is open
        if what == "lacks one":
            trained[there[-1]] = (NONE, NONE)
        elif what == "of other content":
            trained[there[0]] = (trained[there[0]][0] + ANEW, trained[there[0]][1])
        names = self._names(iteration, trained)
        if what == "of one more":
            names[self._real.batch_id(iteration, OTHER)] = "f" * 64
        made = self._announced(server, iteration + 1) + (what == "of other weights")
        far = iteration + bounds.lag + 1
        is_open_ended = what == "opens too far" or (far <= bounds.last_iteration and draw((True, True, False)))
        opening = bounds.opening(far + (what == "opens too far"), iteration + 1) if is_open_ended else None
        follows = NO_RECORD if what == "after another record" else server.last

        def model(server: Server) -> Answer:
            contents = tuple(content for content, _ in trained)
            engine_told = max(engine, ANY)
            told: dict[str, Any] = {"made": made, "follows": follows, "engine": engine_told, "off": OFF}
            outcome, after = fence.commit(server, epoch, iteration, contents, opening, **told)
            if what == "of one more" and outcome in ("committed", "out_of_order", "no_manifest"):
                return "divergent", server
            return outcome, after

        record = self._record(COMMIT, server, iteration, epoch, follows, names)
        real_opening = self._real.opening(opening) if opening else None
        made_text = (iteration + 1, digest_text(made))
        return WrongCall(
            f"commits, {what}",
            model,
            lambda: side.commit(record, names, event=None, opening=real_opening, next_version=made_text),
            ("already_committed",),
        )

    def _trained(self, server: Server, iteration: int) -> tuple[list[tuple[int, int]], bool]:
        """(content, digest of its sampler) of each batch that is published, and whether nothing else is expected."""
        slot = server.slot_of(iteration)
        trained = [
            (batch.made[0], batch.made[3][2]) if batch and batch.made else (NONE, NONE) for batch in slot.batches
        ]
        return trained, not fence.contradiction(slot, tuple(content for content, _ in trained), OFF)

    def _names(self, iteration: int, trained: list[tuple[int, int]]) -> dict[str, str]:
        return {
            self._real.batch_id(iteration, batch): self._real.digest_of(iteration, batch, content=one[0], digest=one[1])
            for batch, one in enumerate(trained)
            if one[0] != NONE
        }

    def _record(
        self, kind: int, server: Server, iteration: int, epoch: int, follows: Record, trained: dict[str, str]
    ) -> Any:
        return self._real.record(
            kind,
            iteration,
            digest=self._announced(server, iteration),
            epoch=epoch,
            previous=self._real.links[follows],
            trained=trained,
        )

    def _rewinds(self, state: State, epoch: int, side: TrainerSide) -> WrongCall | None:
        server = state.server
        iteration = max(0, server.committed + 1 - self._random.choice((-1, -1, 0, 1)))
        if server.last == (REWIND, iteration, epoch) or iteration > self._bounds.iterations:
            return None  # a repeat is the same record: the walk's trainers repeat their own
        follows = self._random.choice((server.last, NO_RECORD))
        record = self._record(REWIND, server, iteration, epoch, follows, {})
        return WrongCall(
            "rewinds",
            lambda server: fence.rewind(server, epoch, iteration, follows=follows, off=OFF),
            lambda: side.rewind(record),
        )

    # Generators

    def _publishes(self, state: State, sides: list[GeneratorSide], late: Late) -> WrongCall | None:
        what = self._random.choice(sorted(FAULTS))
        iteration, batch, *_, attempt, (digest,), number = self._in_model(late)
        right = Publication(iteration, batch, *divmod(digest, VARIANTS), GENERATORS * attempt + late.who)
        one = FAULTS[what](right)
        if not 0 <= one.version < len(state.server.versions) or one.iteration < 0:
            return None
        by = self._random.randrange(len(sides)) if self._bounds.kinds > 1 else late.who
        digest = VARIANTS * one.version + one.variant
        there = dict(enumerate(self._trained(state.server, one.iteration)[0])).get(one.batch, (NONE, NONE))
        if there[0] == one.content and there[1] != digest:
            one = one._replace(content=one.content + ANEW)  # the ledger of the model doesn't say who sampled
        fields = {"iteration": one.iteration, **one.fields}
        rollouts = self._real.rollouts(iteration, batch, content=one.content, digest=digest, **fields)
        claim = replace(late.claim, prompt_batch=replace(late.claim.prompt_batch, batch_id=rollouts.batch_id))
        return WrongCall(
            what,
            lambda server: table.publish(
                server,
                (one.iteration, one.batch, 0, 0, attempt, (digest,), number),
                late.who,
                one.content,
                is_complete=one.is_complete,
                fits=one.fits,
                rollout_id=0,
                stages=self._bounds.stages_of(one.batch),
                engine=self._bounds.engine_of(by),
                off=OFF,
            ),
            lambda: sides[by].publish(claim, rollouts).value,
        )

    def _proves(self, state: State, sides: list[GeneratorSide], late: Late) -> WrongCall:
        """Shows what no version of the job has any more, or yet."""
        version = self._random.randrange(len(state.server.weights))
        digest = VARIANTS * version + VARIANTS - 1
        logprobs = numbers_of(digest).tobytes()
        return WrongCall(
            "proves other weights",
            lambda server: table.prove(server, late.who, digest, is_right=True, off=OFF),
            lambda: sides[late.who].prove(self._real.manifest(digest), logprobs, kind="kind float32").outcome,
        )

    def _in_model(self, late: Late) -> ModelClaim:
        """With the number that the model knows; where another lease came after it, with one that never comes."""
        is_newest = self.newest.get(late.model[:2]) == late.claim.number
        return late.model if is_newest else (*late.model[:6], NO_NUMBER)

    def _gives_back(self, _state: State, sides: list[GeneratorSide], late: Late) -> WrongCall:
        claim, is_released = self._in_model(late), self._random.random() < 0.5
        side = sides[late.who]
        return WrongCall(
            "gives back" if is_released else "fails",
            lambda server: table.fail(server, claim, late.who, self._bounds.max_attempts, OFF, is_released=is_released),
            lambda: side.fail(late.claim, "too late", is_released=is_released).value,
        )

    def _renews_its_leases(self, state: State, sides: list[GeneratorSide], late: Late) -> WrongCall:
        """Renews all of its generator's claims, after a call that names more than one call may.

        A copy that is not known to be lost is held by a mark of its own.
        """
        mine = [one for one in self.claims if one.who == late.who]
        states = [table.renew(state.server, self._in_model(one), late.who, OFF)[0] for one in mine]

        def real() -> str:
            self._renew_too_many(sides[late.who], late.claim)
            renewal = sides[late.who].renew([one.claim for one in mine])
            found = [
                "lost" if one.claim in renewal.lost else "settled" if one.claim in renewal.settled else "held"
                for one in mine
            ]
            for at, one in enumerate(mine):
                if one.claim.hedged and (found[at], states[at]) == ("held", "lost"):
                    found[at] = "lost"
            return " ".join(found)

        return WrongCall("renews its leases", lambda server: (" ".join(states), server), real)

    def _renew_too_many(self, side: GeneratorSide, claim: Claim) -> None:
        """Sends what no client of ours does: the function refuses it before it looks at any of the leases."""
        packed = encode({"leases": [side._lease_of(claim)] * (MAX_LEASES + 1)})
        words = ("FCALL", function_name("renew"), 0, claim.prompt_batch.job_id, "", packed)
        with pytest.raises(ResponseError, match=f"at most {MAX_LEASES} are taken"):
            self._broker.redis.execute_command(*words)

    def _asks_in_vain(self, state: State, sides: list[GeneratorSide]) -> WrongCall | None:
        """Claims where all that is left is leased, also where it could get a copy of what it holds itself."""
        who = self._random.randrange(len(sides))
        server, unheard = state.server, state.workers[who]
        each = {
            self._real.batch_id(one.iteration, index): batch.prompts
            for one in server.window
            for index, batch in enumerate(server.slot_of(one.iteration).batches)
            if batch
        }
        is_other = table.is_other_engine(server, self._bounds.engine_of(who))
        if (unheard and not holds(unheard)) or is_other or any(item[:1] == (FREE,) for item in each.values()):
            return None
        mine = [batch_id for batch_id, item in each.items() if item[:1] == (LEASED,) and item[2] == who]

        def real() -> str:
            if not server.window:
                return "nothing" if sides[who].claim(LONG_S) is None else "a claim"
            set_typical_time(self._broker, self._real.keys, LONG_S)
            self._set_claimed(mine, 1)
            claim = sides[who].claim(LONG_S, hedge=True)
            self._set_claimed(mine, int(1000 * self._broker.now_s()))
            return "nothing" if claim is None else "a claim"

        return WrongCall("asks in vain", lambda server: ("nothing", server), real)

    def _set_claimed(self, batch_ids: list[str], claimed_ms: int) -> None:
        for batch_id in batch_ids:
            iteration = int(batch_id.partition("/")[0])
            set_claim_times(self._broker, self._real.keys, batch_id, iteration=iteration, claimed_ms=claimed_ms)
