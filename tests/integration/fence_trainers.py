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
from tests.model.fence import COMMIT, DEAD, EXPECTED, PUBLISHED, REWIND, VARIANTS, Record, Server
from tests.model.real import RealFence, answer_of, digest_text

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
ALL_CHECKS: fence.Off = frozenset()
NO_RECORD: Record = (0, 0, 0)


class TrainerMoves(RuleBasedStateMachine):
    """Three trainers that want one job."""

    broker: ClassVar[StutteringBroker]
    seen: ClassVar[Counter[str]]
    """Outcomes over all examples: a search that never gets somewhere proves nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.real = RealFence(
            self.broker,
            num_batches=NUM_BATCHES,
            rollout__max_attempts=MAX_ATTEMPTS,
            limits__max_batch_bytes=MAX_BATCH_BYTES,
        )
        self.real.links[NO_RECORD] = "f" * 64
        self.job_id, self.keys = self.real.job_id, self.real.keys
        self.server = fence.nothing(NUM_BATCHES, NUM_VERSIONS)
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
        self.last = [0, 0, 0]
        """[trainers] The newest rollout that each was given."""
        self.arrived: list[dict[int, int]] = [{}, {}, {}]
        """[trainers] Batch → content, of the open iteration."""

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
        self.epochs[who], self.last[who], self.arrived[who] = self.server.epoch, 0, {}
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
        if self.server.is_open and version == self.server.iteration:
            return
        digest = VARIANTS * version + variant
        self.both(
            lambda: self.trainers[who].publish_weights(manifest(version, digest_text(digest)), oldest_kept=0),
            lambda server: fence.publish_weights(server, self.epochs[who], digest, oldest_kept=0, off=ALL_CHECKS),
        )

    def _announced(self, version: int) -> int:
        """The digest of this version; of one that nothing announced, one that could have been."""
        digest = self.server.weights[version]
        return VARIANTS * version if digest == -1 else digest

    @rule(who=TRAINER, ahead=st.sampled_from([0, 1, 1, 2]))
    def open(self, who: int, ahead: int = 1) -> None:
        who = self._index(who)
        iteration = max(0, self.server.committed + ahead)
        digest = self._announced(iteration)
        said, outcome = self.both(
            lambda: self.trainers[who].open_iteration(self.real.opening(digest), {iteration: digest_text(digest)}),
            lambda server: fence.open_iteration(server, self.epochs[who], iteration, digest, ALL_CHECKS, first=99),
        )
        if outcome in ("opened", "already_open"):
            assert said == (outcome == "opened")
        self._note_beginning(is_new=outcome == "opened", name=f"open: {outcome}")

    def _note_beginning(self, *, is_new: bool, name: str) -> None:
        self.seen[name] += 1
        if is_new:
            self.num_beginnings += 1
            self.arrived = [{}, {}, {}]

    @rule(who=TRAINER, max_batches=st.integers(1, 3), waits=st.booleans(), is_lost=st.booleans())
    def claim_rollouts(self, who: int, max_batches: int, waits: bool = False, is_lost: bool = False) -> None:
        who = self._index(who)
        if waits:
            self.trainers[who].wait_for_rollouts(self.server.iteration, SHORT_S)
        self.broker.loses_next_answer |= is_lost
        given: list[fence.Rollout] = []

        def claimed(server: Server) -> tuple[str, Server]:
            outcome, after, rollouts = fence.claim_rollouts(
                server, self.epochs[who], self.last[who], ALL_CHECKS, max_batches=max_batches
            )
            if outcome == "claimed" and not server.is_open:
                return "wrong_iteration", server
            given[:] = rollouts
            return outcome, after

        said, outcome = self.both(
            lambda: self.trainers[who].claim_rollouts(self.server.iteration, max_batches=max_batches), claimed
        )
        if outcome in ("fenced", "wrong_iteration"):
            return
        arrived, num_dead = said
        assert [one.batch.batch_id for one in arrived] == [f"{one[2]}/train/{one[1]}" for one in given]
        for rollout_id, batch, iteration, digest, content, _, _ in given:
            expected = self.real.digest_of(iteration, batch, content=content, digest=digest)
            assert expected in {one.digest for one in arrived}
            self.arrived[who][batch] = content
            self.last[who] = max(self.last[who], rollout_id)
        if self.server.is_open:
            assert num_dead == sum(ledger[:1] == (DEAD,) for ledger, _ in self.server.batches)

    @rule(successor=st.integers(0, 2), max_batches=st.integers(1, 3))
    def a_successor_takes_over(self, successor: int, max_batches: int) -> None:
        """It is given what the one before it had claimed, and what is new."""
        self.claim_rollouts(CURRENT, max_batches)
        self.trainer_lease(CURRENT, "expire")
        self.acquire(successor)
        self.claim_rollouts(successor, max_batches)

    @rule(who=TRAINER, kind=COMMITS, opens=st.booleans(), late=st.booleans())
    def commit(self, who: int, kind: str, opens: bool, late: bool) -> None:
        who = self._index(who)
        server = self.server
        iteration = server.iteration - (1 if late and server.iteration > 0 else 0)
        trained = self._trained(kind)
        names = {
            f"{iteration}/train/{batch}": self.real.digest_of(iteration, batch, content=content, digest=server.digest)
            for batch, content in enumerate(trained)
            if content != -1
        }
        opening = self._announced(iteration + 1) if opens else -1
        follows = NO_RECORD if kind == "unlinked" else server.last
        record = self._record(COMMIT, who, iteration, follows, names)
        _, outcome = self.both(
            lambda: self.trainers[who].commit(
                record,
                names,
                event=None,
                opening=self.real.opening(opening) if opens else None,
                made=(iteration + 1, digest_text(opening)) if opens else None,
            ),
            lambda server: fence.commit(
                server, self.epochs[who], iteration, trained, opening, follows=follows, first=99, off=ALL_CHECKS
            ),
        )
        is_new = self.server.last != server.last or self.server.committed != server.committed
        if is_new:
            self._note_record((COMMIT, iteration, self.epochs[who]), record, follows)
        self._note_beginning(is_new=is_new, name=f"commit: {outcome}")

    def _trained(self, kind: str) -> tuple[int, ...]:
        """What the iteration's batches are, or almost."""
        memory = self.arrived[self._index(CURRENT)]
        trained = []
        for batch, (ledger, _) in enumerate(self.server.batches):
            if ledger[:1] == (PUBLISHED,):
                trained.append(ledger[1])
            else:
                trained.append(memory.get(batch, -1) if ledger[:1] == (EXPECTED,) else -1)
        there = [batch for batch, content in enumerate(trained) if content != -1]
        if there and kind == "missing":
            trained[there[-1]] = -1
        if there and kind == "divergent":
            trained[there[0]] += 512
        return tuple(trained)

    def _record(self, kind: int, who: int, iteration: int, follows: Record, trained: dict[str, str]) -> Any:
        return self.real.record(
            kind,
            iteration,
            digest=self.server.digest,
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
        if server.last == mine and not server.is_open and server.committed == iteration - 1:
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

    @rule(who=TRAINER, late=st.booleans())
    def reconcile(self, who: int, late: bool) -> None:
        who = self._index(who)
        iteration = max(0, self.server.iteration - late)
        lost = sum(ledger[:1] == (EXPECTED,) and not entry for ledger, entry in self.server.batches)
        said, outcome = self.both(
            lambda: self.trainers[who].reconcile(iteration, self.real.batches(iteration, self.server.digest)),
            lambda server: self._reconciled(server, who, iteration),
        )
        if outcome == "dispatched":
            assert said == lost
            self.seen[f"reconcile: {said}"] += 1
            if said:
                self.counters["redispatched"] += said

    def _reconciled(self, server: Server, who: int, iteration: int) -> tuple[str, Server]:
        outcome, after = fence.reconcile(server, self.epochs[who], iteration, ALL_CHECKS)
        return ("not open at iteration" if outcome == "wrong_iteration" else outcome), after
