"""What the fence must do, as plain Python: the oracle of test_fence_properties.py.

It says nothing about Redis. `ServerModel` is all that the server knows, so a deep copy of it is what a server that
lost its last writes knows again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.generator_side import FailOutcome, PublishOutcome
from contracts.rollouts import PromptBatch, RolloutBatch


@dataclass
class Entry:
    """A prompt batch on the stream. Its lease is the triple of entry, generator and attempt."""

    batch_id: str
    first_attempt: int
    deliveries: int = 0
    generator: str = ""
    is_expired: bool = False
    entry_id: str = ""
    """Learnt from the server when the entry is first seen."""
    late_since: int = 0
    """The older, the smaller; 0: not late."""
    hedger: str = ""
    """Who works on a copy, or did."""

    @property
    def attempt(self) -> int:
        return self.first_attempt + self.deliveries - 1


@dataclass
class Slot:
    """A batch in the ledger: expected, published or dead."""

    prompt_batch: PromptBatch
    entry: Entry
    status: str = "expected"
    digest: str = ""
    generator: str = ""
    attempt: int = 0


@dataclass
class ServerModel:
    """All that survives in the server."""

    max_attempts: int
    max_batch_bytes: int
    epoch: int = 0
    owner: str = ""
    lease_is_live: bool = False
    state: str = ""
    iteration: int = -1
    version: int = 0
    digest: str = ""
    committed: int = -1
    weights: dict[int, str] = field(default_factory=dict)
    ledger: dict[str, Slot] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    """The prompts stream, oldest first."""
    published: list[str] = field(default_factory=list)
    """The rollouts stream: batch ids, oldest first."""
    dead: list[str] = field(default_factory=list)
    audit: list[tuple[str, int, int]] = field(default_factory=list)
    """(kind, iteration, trainer epoch)."""
    last_link: str = ""
    """Digest of the newest audit record."""
    counters: Counter[str] = field(default_factory=Counter)
    knows_typical_time: bool = False

    # Generators

    def claim(self, generator: str) -> Entry | None:
        """The oldest expired lease, else the next new batch; what was tried too often is buried on the way (I5)."""
        while self.state == "open":
            entry = next((entry for entry in self.entries if entry.is_expired), None)
            if entry:
                self.counters["reclaimed"] += 1
            else:
                entry = next((entry for entry in self.entries if not entry.deliveries), None)
            if entry is None:
                return None
            entry.deliveries += 1
            entry.generator, entry.is_expired = generator, False
            if entry.attempt <= self.max_attempts:
                entry.late_since = 0
                if entry.hedger == generator:
                    entry.hedger = ""
                return entry
            self._bury(entry)
        return None

    def hedge(self, generator: str) -> Entry | None:
        """For who finds nothing to claim: the oldest late batch of its first holder that nobody hedged."""
        late = [
            entry
            for entry in self.entries
            if entry.late_since and entry.deliveries == 1 and entry.generator != generator and not entry.hedger
        ]
        if self.state != "open" or not self.knows_typical_time or not late:
            return None
        entry = min(late, key=lambda entry: entry.late_since)
        entry.hedger = generator
        self.counters["hedged"] += 1
        return entry

    def renew(self, batch_id: str, entry_id: str, generator: str) -> str:
        """held, lost or settled: a hedger holds its mark, and keeps no lease alive."""
        held = self.holder_of(entry_id)
        if held and held.generator == generator:
            held.is_expired = False
            return "held"
        slot = self.ledger.get(batch_id)
        if slot is None or slot.status != "expected":
            return "settled"
        if (slot.entry.entry_id, slot.entry.hedger) != (entry_id, generator):
            return "lost"
        return "held"

    def holder_of(self, entry_id: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.entry_id == entry_id and entry.generator), None)

    def publish(self, batch: RolloutBatch, *, digest: str, num_bytes: int) -> PublishOutcome:
        outcome = self._judge(batch, digest=digest, num_bytes=num_bytes)
        if outcome is not PublishOutcome.ACCEPTED:
            self.counters[f"rejected:{outcome.value}"] += 1
            return outcome
        slot = self.ledger[batch.batch_id]
        if slot.status == "expected":
            slot.status, slot.digest = "published", digest
            slot.generator, slot.attempt = batch.generator_id, batch.attempt
            holders = {entry.generator for entry in self.entries if entry is slot.entry}
            self.knows_typical_time |= batch.generator_id in holders | {slot.entry.hedger}
            if slot.entry.hedger == batch.generator_id:
                self.counters["hedges_won"] += 1
            self.entries = [entry for entry in self.entries if entry.batch_id != batch.batch_id]
            self.published.append(batch.batch_id)
            self.counters["accepted"] += 1
            self.counters["accepted_bytes"] += num_bytes
        return outcome

    def _judge(self, batch: RolloutBatch, *, digest: str, num_bytes: int) -> PublishOutcome:
        """The reasons in the order in which they are given (I1, I2, I3)."""
        if batch.iteration != self.iteration:
            return PublishOutcome.STALE if batch.iteration < self.iteration else PublishOutcome.FUTURE
        if self.state != "open":
            return PublishOutcome.CLOSED
        if batch.policy_version != self.version:
            return PublishOutcome.STALE if batch.policy_version < self.version else PublishOutcome.FUTURE
        if batch.weights_digest != self.digest:
            return PublishOutcome.WRONG_WEIGHTS
        slot = self.ledger.get(batch.batch_id)
        if slot is None or slot.status == "dead":
            return PublishOutcome.UNEXPECTED
        if slot.status == "published":
            is_repeat = (slot.generator, slot.attempt, slot.digest) == (batch.generator_id, batch.attempt, digest)
            return PublishOutcome.ACCEPTED if is_repeat else PublishOutcome.DUPLICATE
        expected = slot.prompt_batch
        if (len(batch.groups), batch.group_size) != (len(expected.prompts), expected.group_size):
            return PublishOutcome.INCOMPLETE
        return PublishOutcome.OVERSIZE if num_bytes > self.max_batch_bytes else PublishOutcome.ACCEPTED

    def fail(self, entry_id: str, generator: str, attempt: int) -> FailOutcome:
        entry = self.holder_of(entry_id)
        if entry is None or (entry.generator, entry.attempt) != (generator, attempt):
            return FailOutcome.SETTLED
        self.counters["failed"] += 1
        if attempt >= self.max_attempts:
            self._bury(entry)
            return FailOutcome.DEAD
        self.entries.remove(entry)
        self._dispatch(entry.batch_id, attempt + 1)
        return FailOutcome.RETRIED

    def _dispatch(self, batch_id: str, attempt: int) -> None:
        entry = self.ledger[batch_id].entry = Entry(batch_id, attempt)
        self.entries.append(entry)

    def _bury(self, entry: Entry) -> None:
        self.entries.remove(entry)
        self.ledger[entry.batch_id].status = "dead"
        self.dead.append(entry.batch_id)
        self.counters["dead"] += 1

    # Trainers; the caller has checked the epoch

    def open(self, iteration: int, digest: str, batches: tuple[PromptBatch, ...]) -> str:
        """opened, already_open or refused (I4)."""
        if (self.state, self.iteration, self.digest) == ("open", iteration, digest):
            return "already_open"
        if self.state == "open" or iteration != self.committed + 1 or iteration not in self.weights:
            return "refused"
        self._open(iteration, digest, batches)
        return "opened"

    def _open(self, iteration: int, digest: str, batches: tuple[PromptBatch, ...]) -> None:
        self.state, self.iteration, self.version, self.digest = "open", iteration, iteration, digest
        self.entries = [Entry(batch.batch_id, 1) for batch in batches]
        self.ledger = {batch.batch_id: Slot(batch, entry) for batch, entry in zip(batches, self.entries, strict=True)}

    def commit(
        self,
        iteration: int,
        trained: Mapping[str, str],
        opening: tuple[int, str, tuple[PromptBatch, ...]] | None,
        *,
        previous: str,
        link: str,
    ) -> str:
        """committed, already_committed or refused (I3, I4)."""
        if self.committed >= iteration:
            return "already_committed"
        if self.state != "open" or self.iteration != iteration or not self._is_complete(trained):
            return "refused"
        if previous != self.last_link:
            return "refused"
        if opening and (opening[0] != iteration + 1 or opening[0] not in self.weights):
            return "refused"
        self._clear()
        self.audit.append(("commit", iteration, self.epoch))
        self.last_link = link
        self.committed = iteration
        if opening:
            self._open(*opening)
        return "committed"

    def _is_complete(self, trained: Mapping[str, str]) -> bool:
        living = {batch_id: slot for batch_id, slot in self.ledger.items() if slot.status != "dead"}
        digests = {batch_id: slot.digest for batch_id, slot in living.items() if slot.status == "published"}
        return living.keys() == trained.keys() and all(trained[key] == digest for key, digest in digests.items())

    def rewind(self, iteration: int, *, previous: str, link: str) -> str:
        """rewound, or refused where it would leave a gap, in the iterations or in the chain."""
        if iteration > self.committed + 1 or previous != self.last_link:
            return "refused"
        self._clear()
        self.committed = self.iteration = iteration - 1
        self.audit.append(("rewind", iteration, self.epoch))
        self.last_link = link
        self.counters["rewinds"] += 1
        return "rewound"

    def reconcile(self, iteration: int) -> int | None:
        """How many lost batches go out again; None where it is refused."""
        if self.state != "open" or iteration != self.iteration:
            return None
        there = {entry.batch_id for entry in self.entries}
        lost = [key for key, slot in self.ledger.items() if slot.status == "expected" and key not in there]
        for batch_id in lost:
            self._dispatch(batch_id, 1)
        if lost:
            self.counters["redispatched"] += len(lost)
        return len(lost)

    def _clear(self) -> None:
        self.state = "closed"
        self.ledger, self.entries, self.published = {}, [], []
