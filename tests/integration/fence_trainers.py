"""The trainers' moves of test_fence_properties.py: each call goes to the server and to the model (tests/model)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from broker.generator_side import GeneratorSide
from tests.integration.fence_parts import MAX_BATCH_BYTES, StutteringBroker, manifest
from tests.model import fence
from tests.model.real import RealFence, Sent, answer_of, digest_text
from tests.model.server import (
    COMMIT,
    DEAD,
    EXPECTED,
    NONE,
    PUBLISHED,
    REWIND,
    VARIANTS,
    Off,
    Record,
    Rollout,
    Server,
    nothing,
)
from tests.model.state import Bounds

NUM_BATCHES = 2
NUM_VERSIONS = 120
"""More than the steps of an example can open."""
MAX_ATTEMPTS = 2
SHORT_S = 0.001
"""A wait reads what is there; nothing can come, for nothing else is at work."""
CURRENT = -1
"""The trainer that holds the epoch: most calls of a trainer are legal ones."""
TRAINER = st.sampled_from([CURRENT, CURRENT, CURRENT, CURRENT, 0, 1, 2])
COMMITS = st.sampled_from(["right", "right", "right", "missing", "divergent", "unlinked"])
GRANTED = {"published", "opened", "already_open", "claimed", "committed", "already_committed", "dispatched"} | {
    "rewound",
    "already_rewound",
}
ALL_CHECKS: Off = frozenset()
NO_RECORD: Record = (0, 0, 0)
NOTHING = (NONE, NONE)
"""No content, by no version."""


class TrainerMoves(RuleBasedStateMachine):
    """Three trainers that want one job."""

    broker: ClassVar[StutteringBroker]
    bounds: ClassVar[Bounds] = Bounds(batches=NUM_BATCHES, iterations=NUM_VERSIONS - 1)
    seen: ClassVar[Counter[str]]
    """Outcomes over all examples: a search that never gets somewhere proves nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.real = RealFence(
            self.broker,
            self.bounds,
            rollout__max_attempts=MAX_ATTEMPTS,
            limits__max_batch_bytes=MAX_BATCH_BYTES,
        )
        self.real.links[NO_RECORD] = "f" * 64
        self.job_id, self.keys = self.real.job_id, self.real.keys
        self.server = nothing(NUM_BATCHES, NUM_VERSIONS, num_open=self.bounds.lag + 1)
        self.owner, self.lease_is_live = CURRENT, False
        """The holder of the trainer's lease; time is the machine's, not the model's."""
        self.clock = 0
        """The newest epoch of the model that was ever handed out."""
        self.counters: Counter[str] = Counter()
        self.previous: dict[Record, Record] = {}
        """Audit record → the one that it follows."""
        self.num_rollouts = 0
        self.num_beginnings = 0
        """Iterations that were opened, committed or rewound."""
        self._restart_trainers()
        self.generators = [GeneratorSide(self.broker, self.job_id, f"g{i}") for i in range(3)]

    def _restart_trainers(self) -> None:
        """Each has to acquire again, and knows nothing."""
        self.trainers = [self.real.trainer(f"t{i}") for i in range(3)]
        self.epochs = [-1, -1, -1]
        self.last = [self._no_rollouts() for _ in range(3)]
        """[trainers, slots] The newest rollout that each was given."""
        self.arrived: list[dict[tuple[int, int], tuple[int, int]]] = [{}, {}, {}]
        """[trainers] (iteration, batch) → (content, digest of its sampler)."""

    def _no_rollouts(self) -> list[int]:
        return [0] * (self.bounds.lag + 1)

    @property
    def oldest(self) -> int:
        """The oldest open iteration, else the last committed one."""
        return self.server.committed + bool(self.server.window)

    def _index(self, who: int) -> int:
        if who != CURRENT:
            return who
        return self.epochs.index(self.server.epoch) if self.server.epoch in self.epochs else 0

    def both(self, real: Callable[[], Any], model: Callable[[Server], tuple[str, Server]]) -> tuple[Any, str]:
        """(a trainer's answer from the server, the model's outcome): both refuse with the same word, or none does."""
        times = 2 if self.broker.loses_next_answer else 1
        said, outcome = answer_of(real), ""
        for _ in range(times):
            outcome, self.server = model(self.server)
        assert isinstance(said, str) == (outcome not in GRANTED), f"the model says {outcome}, the server {said}"
        if isinstance(said, str):
            assert outcome in said, f"the model says {outcome}, the server {said}"
        if outcome == "fenced":
            assert said == "fenced"
            self.seen["fenced off"] += 1
        return said, outcome

    @initialize()
    def begin(self) -> None:
        self.acquire(0)
        self.publish_weights(0, 0, 0)
        for _ in range(self.bounds.lag + 1):
            self.open(0, 1)

    @rule(who=st.integers(0, 2))
    def acquire(self, who: int) -> None:
        said = answer_of(self.trainers[who].acquire)
        if self.lease_is_live and self.owner != who:
            assert said == "refused"
            return
        if self.owner != who:
            assert said > max(self.real.epochs.values()), "an epoch was handed out twice (I4)"
            self.server = fence.acquire(self.server, clock=self.clock + 1, off=ALL_CHECKS)
            self.clock = self.server.epoch
            self.real.epochs[self.clock] = said
        assert said == self.real.epochs[self.server.epoch]
        self.epochs[who], self.last[who], self.arrived[who] = self.server.epoch, self._no_rollouts(), {}
        self.owner, self.lease_is_live = who, True

    @rule(who=TRAINER, what=st.sampled_from(["renew", "release", "expire"]))
    def trainer_lease(self, who: int, what: str) -> None:
        who = self._index(who)
        if what == "expire":
            self.broker.redis.hset(self.keys.fence, "lease_until", "1")
            self.lease_is_live = False
            return
        said = answer_of(self.trainers[who].renew if what == "renew" else self.trainers[who].release)
        assert (said == "fenced") == (self.epochs[who] != self.server.epoch)
        if said != "fenced":
            self.lease_is_live = what == "renew"
            self.owner = self.owner if what == "renew" else CURRENT

    @rule(who=TRAINER, ahead=st.integers(0, 1), variant=st.integers(0, 1))
    def publish_weights(self, who: int, ahead: int, variant: int) -> None:
        who = self._index(who)
        version = self.server.committed + 1 + ahead
        digest = VARIANTS * version + variant
        self.both(
            lambda: self.trainers[who].publish_weights(manifest(version, digest_text(digest)), oldest_kept=0),
            lambda server: fence.publish_weights(server, self.epochs[who], digest, oldest_kept=0, off=ALL_CHECKS),
        )

    def _announced(self, version: int) -> int:
        """The digest of this version; of one that nothing announced, one that could have been."""
        digest = self.server.weights[version]
        return VARIANTS * version if digest == NONE else digest

    @rule(who=TRAINER, ahead=st.sampled_from([0, 1, 1, 2]))
    def open(self, who: int, ahead: int = 1) -> None:
        who = self._index(who)
        newest_made = self.server.committed + 1
        opening = self.bounds.opening(max(0, self.server.newest + ahead), newest_made)
        versions = range(max(0, newest_made - self.bounds.lag), newest_made + 1)
        digests = tuple(self._announced(version) for version in versions)
        named = {digest // VARIANTS: digest_text(digest) for digest in digests}
        said, outcome = self.both(
            lambda: self.trainers[who].open_iteration(self.real.opening(opening), named),
            lambda server: fence.open_iteration(server, self.epochs[who], opening, digests, ALL_CHECKS),
        )
        if outcome in ("opened", "already_open"):
            assert said == (outcome == "opened")
        self._note_beginning(is_new=outcome == "opened", name=f"open: {outcome}")

    def _note_beginning(self, *, is_new: bool, name: str) -> None:
        self.seen[name] += 1
        if is_new:
            self.num_beginnings += 1

    @rule(who=TRAINER, max_batches=st.integers(1, 3), waits=st.booleans(), is_lost=st.booleans())
    def claim_rollouts(self, who: int, max_batches: int, waits: bool = False, is_lost: bool = False) -> None:
        who = self._index(who)
        iteration, slot = self.oldest, self.oldest % (self.bounds.lag + 1)
        if waits:
            self.trainers[who].wait_for_rollouts(iteration, SHORT_S)
        self.broker.loses_next_answer |= is_lost
        given: list[Rollout] = []

        def claimed(server: Server) -> tuple[str, Server]:
            outcome, after, rollouts = fence.claim_rollouts(
                server, self.epochs[who], iteration, self.last[who][slot], ALL_CHECKS, max_batches=max_batches
            )
            given[:] = rollouts
            return outcome, after

        said, outcome = self.both(
            lambda: self.trainers[who].claim_rollouts(iteration, max_batches=max_batches), claimed
        )
        if outcome in ("fenced", "wrong_iteration"):
            return
        arrived, num_dead = said
        assert [one.batch.batch_id for one in arrived] == [self.real.batch_id(one[2], one[1]) for one in given]
        for rollout_id, batch, of, digest, content, _, _ in given:
            expected = self.real.digest_of(of, batch, content=content, digest=digest)
            assert expected in {one.digest for one in arrived}
            self.arrived[who][of, batch] = (content, digest)
            self.last[who][slot] = max(self.last[who][slot], rollout_id)
        assert num_dead == sum(ledger[:1] == (DEAD,) for ledger, _ in self.server.slot_of(iteration).batches)

    @rule(successor=st.integers(0, 2), max_batches=st.integers(1, 3))
    def a_successor_takes_over(self, successor: int, max_batches: int) -> None:
        """It is given what the one before it had claimed, and what is new."""
        self.claim_rollouts(CURRENT, max_batches)
        self.trainer_lease(CURRENT, "expire")
        self.acquire(successor)
        self.claim_rollouts(successor, max_batches)

    @rule(who=TRAINER, kind=COMMITS, opens=st.booleans(), late=st.sampled_from([0, 0, 0, 1, -1]))
    def commit(self, who: int, kind: str, opens: bool, late: int) -> None:
        """late: of the iteration before, or of the one after, which is not the oldest."""
        who = self._index(who)
        server, iteration = self.server, max(0, self.oldest - late)
        trained = self._trained(kind, iteration)
        names = {
            self.real.batch_id(iteration, batch): self.real.digest_of(iteration, batch, content=one[0], digest=one[1])
            for batch, one in enumerate(trained)
            if one[0] != NONE
        }
        made = self._announced(iteration + 1) if opens else NONE
        opening = self.bounds.opening(iteration + self.bounds.lag + 1, iteration + 1) if opens else None
        follows = NO_RECORD if kind == "unlinked" else server.last
        record = self._record(COMMIT, who, iteration, follows, names)
        _, outcome = self.both(
            lambda: self.trainers[who].commit(
                record,
                names,
                event=None,
                opening=self.real.opening(opening) if opening else None,
                made=(iteration + 1, digest_text(made)) if opens else None,
            ),
            lambda server: fence.commit(
                server,
                self.epochs[who],
                iteration,
                tuple(content for content, _ in trained),
                opening,
                made=made,
                follows=follows,
                off=ALL_CHECKS,
            ),
        )
        is_new = self.server.last != server.last or self.server.committed != server.committed
        if is_new:
            self._note_record((COMMIT, iteration, self.epochs[who]), record, follows)
        self._note_beginning(is_new=is_new, name=f"commit: {outcome}")

    def _trained(self, kind: str, iteration: int) -> tuple[tuple[int, int], ...]:
        """(content, digest of its sampler) of what the iteration's batches are, or almost."""
        memory, slot = self.arrived[self._index(CURRENT)], self.server.slot_of(iteration)
        sampled_by = {one[1]: one[3] for one in slot.rollouts}
        trained = []
        for batch, (ledger, _) in enumerate(slot.batches):
            if ledger[:1] == (PUBLISHED,):
                trained.append((ledger[1], sampled_by[batch]))
            else:
                trained.append(memory.get((iteration, batch), NOTHING) if ledger[:1] == (EXPECTED,) else NOTHING)
        there = [batch for batch, one in enumerate(trained) if one != NOTHING]
        if there and kind == "missing":
            trained[there[-1]] = NOTHING
        if there and kind == "divergent":
            trained[there[0]] = (trained[there[0]][0] + 512, trained[there[0]][1])
        return tuple(trained)

    def _record(self, kind: int, who: int, iteration: int, follows: Record, trained: dict[str, str]) -> Any:
        return self.real.record(
            kind,
            iteration,
            digest=self._announced(max(0, iteration)),
            epoch=max(0, self.epochs[who]),
            previous=self.real.links[follows],
            trained=trained,
        )

    def _note_record(self, record: Record, real: Any, follows: Record) -> None:
        self.real.note(record, real)
        self.previous[record] = follows

    @rule(who=TRAINER, back=st.integers(-1, 2), is_linked=st.sampled_from([True, True, True, False]))
    def rewind(self, who: int, back: int, is_linked: bool) -> None:
        who = self._index(who)
        server, iteration = self.server, max(0, self.server.committed + 1 - back)
        mine: Record = (REWIND, iteration, self.epochs[who])
        if server.last == mine and not server.window and server.committed == iteration - 1:
            return  # a repeat is the same record: test_fence_repeats.py
        follows = server.last if is_linked else NO_RECORD
        record = self._record(REWIND, who, iteration, follows, {"it was": str(len(self.real.links))})
        stutters = self.broker.loses_next_answer
        _, outcome = self.both(
            lambda: self.trainers[who].rewind(record),
            lambda server: fence.rewind(server, self.epochs[who], iteration, follows=follows, off=ALL_CHECKS),
        )
        if outcome == "rewound" or (stutters and outcome == "already_rewound"):
            self._note_record(mine, record, follows)
            self.counters["rewinds"] += 1
            self._note_beginning(is_new=True, name="rewind: rewound")
        else:
            self.seen[f"rewind: {outcome}"] += 1

    @rule(who=TRAINER, late=st.sampled_from([0, 0, 1, -1]))
    def reconcile(self, who: int, late: int) -> None:
        who = self._index(who)
        iteration = max(0, self.oldest - late)
        sent = self.bounds.sent(iteration, self.server.committed + 1)
        before = self.server.slot_of(iteration).batches
        said, outcome = self.both(
            lambda: self.trainers[who].reconcile(iteration, self.real.batches(iteration, sent)),
            lambda server: self._reconciled(server, who, iteration, sent),
        )
        if outcome == "dispatched":
            after = self.server.slot_of(iteration).batches
            lost = [ledger for (ledger, entry), (_, now) in zip(before, after, strict=True) if now and not entry]
            assert said == len(lost)
            self.seen[f"reconcile: {said}"] += 1
            self.counters["redispatched"] += sum(bool(ledger) for ledger in lost)

    def _reconciled(self, server: Server, who: int, iteration: int, sent: Sent) -> tuple[str, Server]:
        outcome, after = fence.reconcile(server, self.epochs[who], iteration, sent, ALL_CHECKS)
        return ("not open at iteration" if outcome == "wrong_iteration" else outcome), after

    @rule(who=TRAINER, ahead=st.integers(0, 2))
    def dispatch(self, who: int, ahead: int) -> None:
        """Sends the evaluations of an iteration whose version may not be made yet."""
        who, iteration = self._index(who), max(0, self.server.committed + ahead)
        sent = tuple(one for one in self.bounds.sent(iteration, iteration) if one[1] != NONE)
        if not sent:
            return
        _, outcome = self.both(
            lambda: self.trainers[who].dispatch(iteration, self.real.batches(iteration, sent)),
            lambda server: self._reconciled(server, who, iteration, sent),
        )
        self.seen[f"dispatch: {outcome}"] += 1
