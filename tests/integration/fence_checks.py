"""What a server holds of one job, read at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.connection.client import Broker
from broker.fence import FenceState, fence_of
from broker.keys import GENERATOR_GROUP, JobKeys
from broker.ledger import BatchRecord, Dead, Expected, batch_record
from contracts.encoding.wire import decode
from contracts.events import AuditRecord
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.versions import WeightManifest


@dataclass(frozen=True)
class HeldSlot:
    """What lies where one iteration may be open."""

    ledger: dict[str, BatchRecord]
    prompts: list[tuple[str, str, int]]
    """(entry id, batch id, attempt) of the prompts stream."""
    leases: list[tuple[str, str, int]]
    """(entry id, generator, deliveries)."""
    rollouts: list[RolloutBatch]
    claims: dict[str, int]
    """What may be hedged: batch id → ms of its claim."""

    @property
    def is_empty(self) -> bool:
        return not (self.ledger or self.prompts or self.leases or self.rollouts or self.claims)


@dataclass(frozen=True)
class Held:
    """Everything that the server holds of a job, read at one moment."""

    fence: FenceState
    weights: dict[int, str]
    """Version → digest."""
    counters: dict[str, int]
    slots: tuple[HeldSlot, ...]
    dead: list[str]
    audit: list[AuditRecord]

    def slot_of(self, iteration: int) -> HeldSlot:
        return self.slots[iteration % len(self.slots)]


def read(broker: Broker, keys: JobKeys) -> Held:
    """One transaction, so that nothing moves in between."""
    with broker.redis.pipeline(transaction=True) as pipe:
        for key in (keys.fence, keys.progress, keys.weights, keys.counters):
            pipe.hgetall(key)
        for key in (keys.dead, keys.audit):
            pipe.xrange(key)
        for slot in keys.slots:
            pipe.hgetall(slot.ledger)
            pipe.xrange(slot.prompts)
            pipe.xrange(slot.rollouts)
            pipe.zrange(slot.claims, 0, -1, withscores=True)
            pipe.xpending_range(slot.prompts, GENERATOR_GROUP, "-", "+", 100)
            pipe.hgetall(slot.columns)
        answers = pipe.execute(raise_on_error=False)
    fence, progress, weights, counters, dead, audit, *of_slots = answers
    return Held(
        fence=fence_of(fence, progress),
        weights={int(key): decode(value, WeightManifest).weights_digest for key, value in weights.items()},
        counters={key.decode(): int(value) for key, value in counters.items()},
        slots=tuple(_slot(*of_slots[first : first + 6]) for first in range(0, len(of_slots), 6)),
        dead=[fields[b"batch_id"].decode() for _, fields in dead],
        audit=[decode(fields[b"record"], AuditRecord) for _, fields in audit],
    )


def _slot(ledger: Any, prompts: Any, rollouts: Any, claims: Any, leases: Any, columns: Any) -> HeldSlot:
    rows: Any = leases if isinstance(leases, list) else []  # no group before the first iteration
    return HeldSlot(
        ledger={batch_id.decode(): batch_record(value) for batch_id, value in ledger.items()},
        prompts=[
            (entry.decode(), decode(fields[b"batch"], PromptBatch).batch_id, int(fields[b"attempt"]))
            for entry, fields in prompts
        ],
        leases=[(row["message_id"].decode(), row["consumer"].decode(), row["times_delivered"]) for row in rows],
        rollouts=[
            decode(fields.get(b"batch") or columns[b"b/" + fields[b"batch_id"]], RolloutBatch) for _, fields in rollouts
        ],
        claims={batch_id.decode(): int(at_ms) for batch_id, at_ms in claims},
    )


def word_of(record: BatchRecord) -> str:
    return type(record).__name__.lower()


def check_claims(held: HeldSlot) -> None:
    """The index of what may be hedged is the ledger's: leased to a first holder, and without a copy."""
    first_holders = {entry_id for entry_id, _, deliveries in held.leases if deliveries == 1}
    may_be_hedged = {
        batch_id: one.claimed_ms
        for batch_id, one in held.ledger.items()
        if isinstance(one, Expected) and one.holder and not one.hedger and one.entry in first_holders
    }
    there = {entry_id for entry_id, _, _ in held.prompts}
    lost = {batch_id for batch_id, one in held.ledger.items() if isinstance(one, Dead) or one.entry not in there}
    assert {key: at_ms for key, at_ms in held.claims.items() if key not in lost} == may_be_hedged
