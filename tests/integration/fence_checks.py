"""What a server holds of one job, read at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.connection.client import Broker
from broker.fence import FenceState, fence_of
from broker.keys import STAGE_BAND, JobKeys
from broker.ledger import BatchRecord, Expected, LastClaim, batch_record
from contracts.encoding.wire import decode
from contracts.events import AuditRecord
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.versions import WeightManifest


@dataclass(frozen=True)
class HeldSlot:
    """What lies where one iteration may be open."""

    ledger: dict[str, BatchRecord]
    prompts: list[str]
    """Batches that generators may claim, or have claimed."""
    attempts: dict[str, int]
    """Batch id → its attempts that counted, of those that are claimed by none."""
    leases: dict[str, LastClaim]
    """Batch id → the claim that holds it."""
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
    proofs: dict[tuple[int, str], str]
    """(version, generator) → the digest of the weights that its engine has shown."""

    def slot_of(self, iteration: int) -> HeldSlot:
        return self.slots[iteration % len(self.slots)]


def read(broker: Broker, keys: JobKeys) -> Held:
    """One transaction, so that nothing moves in between."""
    with broker.redis.pipeline(transaction=True) as pipe:
        for key in (keys.fence, keys.progress, keys.weights, keys.counters, keys.proofs):
            pipe.hgetall(key)
        for key in (keys.dead, keys.audit):
            pipe.xrange(key)
        for slot in keys.slots:
            pipe.hgetall(slot.ledger)
            pipe.hgetall(slot.prompts)
            pipe.xrange(slot.rollouts)
            pipe.zrange(slot.claims, 0, -1, withscores=True)
            pipe.zrangebyscore(slot.work, 0, f"({STAGE_BAND}", withscores=True)
            pipe.hgetall(slot.items)
        answers = pipe.execute(raise_on_error=False)
    fence, progress, weights, counters, proofs, dead, audit, *of_slots = answers
    return Held(
        fence=fence_of(fence, progress),
        weights={int(key): decode(value, WeightManifest).weights_digest for key, value in weights.items()},
        counters={key.decode(): int(value) for key, value in counters.items()},
        slots=tuple(_slot(*of_slots[first : first + 6]) for first in range(0, len(of_slots), 6)),
        dead=[fields[b"batch_id"].decode() for _, fields in dead],
        audit=[decode(fields[b"record"], AuditRecord) for _, fields in audit],
        proofs=_proofs(proofs),
    )


def _proofs(fields: dict[bytes, bytes]) -> dict[tuple[int, str], str]:
    """Those of versions; `first KIND` is none."""
    names = {field: field.decode().partition("/") for field in fields if not field.startswith(b"first ")}
    return {(int(version), who): fields[field].decode() for field, (version, _, who) in names.items()}


def _slot(ledger: Any, prompts: Any, rollouts: Any, claims: Any, work: Any, columns: Any) -> HeldSlot:
    ids = {member[2:-2].decode(): score for member, score in work}
    assert sorted(ids) == sorted(decode(one, PromptBatch).batch_id for one in prompts.values())
    last = {
        batch_id: decode(columns[field], LastClaim) if (field := f"l/0/{batch_id}/0".encode()) in columns else None
        for batch_id in ids
    }
    return HeldSlot(
        ledger={batch_id.decode(): batch_record(value) for batch_id, value in ledger.items()},
        prompts=list(ids),
        attempts={key: claim.attempt if claim else 0 for key, claim in last.items() if ids[key] < 1},
        leases={key: claim for key, claim in last.items() if ids[key] >= 1 and claim},
        rollouts=[
            decode(fields.get(b"batch") or columns[b"b/" + fields[b"batch_id"]], RolloutBatch) for _, fields in rollouts
        ],
        claims={batch_id.decode(): int(at_ms) for batch_id, at_ms in claims},
    )


def word_of(record: BatchRecord) -> str:
    return type(record).__name__.lower()


def check_claims(held: HeldSlot) -> None:
    """The index of what may be hedged: it is leased, and without a copy; to a first holder at least it is there."""
    may_be_hedged = {key: one for key, one in held.leases.items() if not one.hedger}
    claims = {key: at_ms for key, at_ms in held.claims.items() if key in held.prompts}  # not of a prompt that is lost
    assert claims.items() <= {key: one.claimed_ms for key, one in may_be_hedged.items()}.items()
    assert {key for key, one in may_be_hedged.items() if one.attempt == 1} <= claims.keys()
    assert set(held.prompts) <= {key for key, one in held.ledger.items() if isinstance(one, Expected)}
