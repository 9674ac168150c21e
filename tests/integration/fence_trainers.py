"""The trainers' moves of test_fence_properties.py: each checks its answer against the model."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from broker.generator_side import Claim, GeneratorSide
from broker.job_store import JobStore
from broker.keys import JobKeys
from broker.trainer_side import Opening, TrainerSide
from contracts.errors import Conflict, FencedOff, FenceViolation
from contracts.events import AuditRecord, record_digest
from contracts.rollouts import PromptBatch
from tests.builders import job_spec, prompt_batch
from tests.integration.fence_model import ServerModel
from tests.integration.fence_parts import MAX_BATCH_BYTES, StutteringBroker, manifest, weights_digest

NUM_BATCHES = 2
MAX_ATTEMPTS = 2
LONG_S = 3600.0
"""No lease ends by itself while a test runs."""
SHORT_S = 0.001
"""A wait reads what is there; nothing can come, for nobody else is at work."""
CURRENT = -1
"""Whoever holds the epoch: most calls of a trainer are legal ones."""
TRAINER = st.sampled_from([CURRENT, CURRENT, CURRENT, CURRENT, 0, 1, 2])
COMMITS = st.sampled_from(["right", "right", "right", "missing", "divergent", "extra", "unlinked"])


class TrainerMoves(RuleBasedStateMachine):
    """Three trainers that want one job."""

    broker: ClassVar[StutteringBroker]
    seen: ClassVar[Counter[str]]
    """Outcomes over all examples: a search that never gets somewhere proves nothing about it."""

    def __init__(self) -> None:
        super().__init__()
        spec = job_spec(
            rollout__max_attempts=MAX_ATTEMPTS, limits__max_batch_bytes=MAX_BATCH_BYTES, name=uuid.uuid4().hex
        )
        self.job_id, _ = JobStore(self.broker).create(spec)
        self.keys = JobKeys(self.job_id)
        self.model = ServerModel(max_attempts=MAX_ATTEMPTS, max_batch_bytes=MAX_BATCH_BYTES)
        self.trainers: list[TrainerSide] = []
        self.epochs: list[int] = []
        self.newest_epoch = 0
        self.arrived: list[dict[str, str]] = []
        """Of each trainer: batch id → digest of the open iteration, since it acquired."""
        self.num_beginnings = 0
        """Iterations that were opened, committed or rewound."""
        self._restart_trainers()
        self.generators = [GeneratorSide(self.broker, self.job_id, f"g{i}") for i in range(3)]
        self.claims: list[tuple[int, Claim]] = []
        """Every claim that was ever answered: the late come back at any time."""
        self.num_late = 0
        """Claims that were made to look old, each one younger than the last."""
        self.disk: tuple[dict[str, bytes], ServerModel, int] | None = None

    # Trainers

    def _index(self, who: int) -> int:
        if who != CURRENT:
            return who
        return self.epochs.index(self.model.epoch) if self.model.epoch in self.epochs else 0

    def _fenced(self, who: int, call: Callable[[], Any]) -> tuple[bool, Any]:
        """(whether the model must move, the answer or "refused"); a trainer of another epoch is fenced off (I4)."""
        is_current = self.epochs[who] != 0 and self.epochs[who] == self.model.epoch
        try:
            answer = call()
        except FencedOff:
            assert not is_current
            self.seen["fenced off"] += 1
            return False, None
        except FenceViolation:
            answer = "refused"
        assert is_current, "a trainer of another epoch was let through"
        return True, answer

    def batches(self, iteration: int, digest: str) -> tuple[PromptBatch, ...]:
        return tuple(
            prompt_batch(
                [[1, 2], [3], [4]],
                job_id=self.job_id,
                batch_id=f"{iteration}/train/{index}",
                iteration=iteration,
                policy_version=iteration,
                weights_digest=digest,
            )
            for index in range(NUM_BATCHES)
        )

    def opening(self, iteration: int) -> Opening:
        digest = self.model.weights.get(iteration, weights_digest(iteration, 0))
        return Opening(
            iteration=iteration,
            policy_version=iteration,
            weights_digest=digest,
            batches=self.batches(iteration, digest),
        )

    @initialize()
    def begin(self) -> None:
        self.acquire(0)
        self.publish_weights(0, 0, 0)
        self.open(0, 0)

    @rule(who=st.integers(0, 2))
    def acquire(self, who: int) -> None:
        model, owner = self.model, f"t{who}"
        is_held = model.lease_is_live and model.owner != owner
        try:
            epoch = self.trainers[who].acquire()
        except Conflict:
            assert is_held
            return
        assert not is_held
        if model.owner == owner:
            assert epoch == model.epoch
        else:
            assert epoch > self.newest_epoch, "an epoch was handed out twice (I4)"
        self.newest_epoch = max(self.newest_epoch, epoch)
        self.epochs[who], self.arrived[who] = epoch, {}
        model.epoch, model.owner, model.lease_is_live = epoch, owner, True

    @rule(who=TRAINER, what=st.sampled_from(["renew", "release", "expire"]))
    def trainer_lease(self, who: int, what: str) -> None:
        who = self._index(who)
        if what == "expire":
            self.broker.redis.hset(self.keys.fence, "lease_until", "1")
            self.model.lease_is_live = False
        elif what == "renew" and self._fenced(who, self.trainers[who].renew)[0]:
            self.model.lease_is_live = True
        elif what == "release" and self._fenced(who, self.trainers[who].release)[0]:
            self.model.lease_is_live, self.model.owner = False, ""

    @rule(who=TRAINER, ahead=st.integers(0, 1), variant=st.integers(0, 1))
    def publish_weights(self, who: int, ahead: int, variant: int) -> None:
        who = self._index(who)
        version = self.model.committed + 1 + ahead
        if self.model.state == "open" and version == self.model.version:
            return
        digest = weights_digest(version, variant)
        side = self.trainers[who]
        if self._fenced(who, lambda: side.publish_weights(manifest(version, digest), oldest_kept=0))[0]:
            self.model.weights[version] = digest

    @rule(who=TRAINER, ahead=st.sampled_from([0, 1, 1, 2]))
    def open(self, who: int, ahead: int = 1) -> None:
        who = self._index(who)
        opening = self.opening(max(0, self.model.committed + ahead))
        stutters = self.broker.loses_next_answer
        moves, answer = self._fenced(who, lambda: self.trainers[who].open_iteration(opening))
        if moves:
            expected = self.model.open(opening.iteration, opening.weights_digest, opening.batches)
            assert (answer == "refused") == (expected == "refused")
            assert stutters or answer == "refused" or answer == (expected == "opened")
            self._forget_arrived(expected == "opened")
            self.seen[f"open: {expected}"] += 1

    def _forget_arrived(self, is_new: bool) -> None:
        if is_new:
            self.num_beginnings += 1
            self.arrived = [{}, {}, {}]

    def _restart_trainers(self) -> None:
        """Each has to acquire again, and knows nothing."""
        self.trainers = [TrainerSide(self.broker, self.job_id, owner=f"t{i}", lease_s=LONG_S) for i in range(3)]
        self.epochs = [0, 0, 0]
        self.arrived = [{}, {}, {}]

    @rule(who=TRAINER, max_batches=st.integers(1, 3), waits=st.booleans(), is_lost=st.booleans())
    def claim_rollouts(self, who: int, max_batches: int, waits: bool = False, is_lost: bool = False) -> None:
        who = self._index(who)
        if waits:
            self.trainers[who].wait_for_rollouts(SHORT_S)
        self.broker.loses_next_answer |= is_lost
        moves, answer = self._fenced(who, lambda: self.trainers[who].claim_rollouts(max_batches=max_batches))
        if not moves:
            return
        arrived, num_dead = answer
        if self.model.state == "open":
            assert num_dead == sum(slot.status == "dead" for slot in self.model.ledger.values())
        for one in arrived:
            self.arrived[who][one.batch.batch_id] = one.digest
            assert one.digest == self.model.ledger[one.batch.batch_id].digest
        if len(arrived) < max_batches:
            missing = [key for key in self.model.published if key not in self.arrived[who]]
            assert not missing, f"published, and never answered to its trainer: {missing}"

    @rule(who=TRAINER, kind=COMMITS, opens=st.sampled_from([None, 1, 1, 2]), late=st.booleans())
    def commit(self, who: int, kind: str, opens: int | None, late: bool) -> None:
        who = self._index(who)
        iteration = self.model.iteration - (1 if late and self.model.iteration > 0 else 0)
        trained = self._trained(kind)
        opening = self.opening(iteration + opens) if opens else None
        record = self._record("commit", iteration, trained, is_linked=kind != "unlinked")
        side = self.trainers[who]
        moves, answer = self._fenced(who, lambda: side.commit(record, trained, event=None, opening=opening))
        if moves:
            opened = (opening.iteration, opening.weights_digest, opening.batches) if opening else None
            links = {"previous": record.previous, "link": record_digest(record)}
            expected = self.model.commit(iteration, trained, opened, **links)
            assert (answer == "refused") == (expected == "refused")
            self._forget_arrived(expected == "committed")
            self.seen[f"commit: {expected}"] += 1

    def _trained(self, kind: str) -> dict[str, str]:
        """What the iteration's batches are, or almost."""
        living = {key: slot.digest for key, slot in self.model.ledger.items() if slot.status != "dead"}
        memory = self.arrived[self.epochs.index(self.model.epoch)] if self.model.epoch in self.epochs else {}
        trained = {key: digest or memory.get(key, "") for key, digest in living.items()}
        trained = {key: digest for key, digest in trained.items() if digest}
        if trained and kind == "missing":
            trained.popitem()
        if trained and kind == "divergent":
            trained[next(iter(trained))] = "0" * 64
        if kind == "extra":
            trained["9/train/9"] = "0" * 64
        return trained

    def _record(self, kind: str, iteration: int, trained: dict[str, str], *, is_linked: bool = True) -> AuditRecord:
        return AuditRecord(
            kind=kind,
            iteration=iteration,
            policy_version=max(0, iteration),
            weights_digest=self.model.digest,
            next_weights_digest="",
            trainer_epoch=self.model.epoch,
            batches=trained,
            abandoned={},
            loss=float(len(self.model.audit)),
            previous=self.model.last_link if is_linked else "f" * 64,
        )

    @rule(who=TRAINER, back=st.integers(-1, 2), is_linked=st.sampled_from([True, True, True, False]))
    def rewind(self, who: int, back: int, is_linked: bool) -> None:
        who = self._index(who)
        iteration = max(0, self.model.committed + 1 - back)
        record = self._record("rewind", iteration, {}, is_linked=is_linked)
        moves, answer = self._fenced(who, lambda: self.trainers[who].rewind(record))
        if moves:
            expected = self.model.rewind(iteration, previous=record.previous, link=record_digest(record))
            assert (answer == "refused") == (expected == "refused")
            self._forget_arrived(expected == "rewound")
            self.seen[f"rewind: {expected}"] += 1

    @rule(who=TRAINER, late=st.booleans())
    def reconcile(self, who: int, late: bool) -> None:
        who = self._index(who)
        iteration = max(0, self.model.iteration - late)
        batches = self.batches(iteration, self.model.digest or weights_digest(0, 0))
        stutters = self.broker.loses_next_answer
        moves, answer = self._fenced(who, lambda: self.trainers[who].reconcile(iteration, batches))
        if moves:
            expected = self.model.reconcile(iteration)
            assert stutters or answer == ("refused" if expected is None else expected)
            self.seen[f"reconcile: {expected}"] += 1
