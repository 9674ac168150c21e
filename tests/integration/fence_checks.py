"""What a server holds of one job, and I1-I5 as checks of it against the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.connection.client import Broker
from broker.keys import GENERATOR_GROUP, JobKeys
from broker.ledger import BatchRecord, Dead, Expected, Published, batch_record
from contracts.encoding.wire import decode
from contracts.events import AuditRecord
from contracts.rollouts import PromptBatch, RolloutBatch, batch_digest
from contracts.versions import WeightManifest
from tests.integration.fence_model import ServerModel


@dataclass(frozen=True)
class Held:
    """Everything that the server holds of a job, read at one moment."""

    fence: dict[str, str]
    progress: dict[str, int]
    weights: dict[int, str]
    """Version → digest."""
    ledger: dict[str, BatchRecord]
    counters: dict[str, int]
    prompts: list[tuple[str, str, int]]
    """(entry id, batch id, attempt) of the prompts stream."""
    leases: list[tuple[str, str, int]]
    """(entry id, generator, deliveries)."""
    rollouts: list[RolloutBatch]
    claims: dict[str, int]
    """What may be hedged: batch id → ms of its claim."""
    dead: list[str]
    audit: list[AuditRecord]


def read(broker: Broker, keys: JobKeys) -> Held:
    """One transaction, so that nothing moves in between."""
    with broker.redis.pipeline(transaction=True) as pipe:
        for key in (keys.fence, keys.progress, keys.weights, keys.ledger, keys.counters):
            pipe.hgetall(key)
        for key in (keys.prompts, keys.rollouts, keys.dead, keys.audit):
            pipe.xrange(key)
        pipe.zrange(keys.claims, 0, -1, withscores=True)
        pipe.xpending_range(keys.prompts, GENERATOR_GROUP, "-", "+", 100)
        answers = pipe.execute(raise_on_error=False)
    fence, progress, weights, ledger, counters, prompts, rollouts, dead, audit, claims, leases = answers
    rows: Any = leases if isinstance(leases, list) else []  # no group before the first iteration
    return Held(
        fence=_text(fence),
        progress={name: int(progress.get(name.encode(), 0)) for name in ("published", "dead")},
        weights={int(key): decode(value, WeightManifest).weights_digest for key, value in weights.items()},
        ledger={batch_id.decode(): batch_record(value) for batch_id, value in ledger.items()},
        counters={key: int(value) for key, value in _text(counters).items()},
        prompts=[
            (entry.decode(), decode(fields[b"batch"], PromptBatch).batch_id, int(fields[b"attempt"]))
            for entry, fields in prompts
        ],
        leases=[(row["message_id"].decode(), row["consumer"].decode(), row["times_delivered"]) for row in rows],
        rollouts=[decode(fields[b"batch"], RolloutBatch) for _, fields in rollouts],
        claims={batch_id.decode(): int(at_ms) for batch_id, at_ms in claims},
        dead=[fields[b"batch_id"].decode() for _, fields in dead],
        audit=[decode(fields[b"record"], AuditRecord) for _, fields in audit],
    )


def word_of(record: BatchRecord) -> str:
    return type(record).__name__.lower()


def _text(rows: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in rows.items()}


def check_fence(held: Held, model: ServerModel) -> None:
    """I4: the fence is where the holders of its epochs moved it; nobody else did."""
    fence = held.fence
    assert int(fence.get("epoch", 0)) == model.epoch
    assert (fence.get("owner", ""), fence.get("state", "")) == (model.owner, model.state)
    assert (int(fence.get("iteration", -1)), int(fence.get("committed", -1))) == (model.iteration, model.committed)
    assert held.weights == model.weights
    if model.state == "open":
        assert (int(fence["version"]), fence["digest"]) == (model.version, model.digest)
        counts = [int(fence["expected"]), held.progress["published"], held.progress["dead"]]
        num_dead = sum(slot.status == "dead" for slot in model.ledger.values())
        assert counts == [len(model.ledger), len(model.published), num_dead]


def check_rollouts(held: Held, model: ServerModel) -> None:
    """I1, I2: each accepted batch is complete and of the fence's weights. I3: it is there once."""
    assert [batch.batch_id for batch in held.rollouts] == model.published
    for batch in held.rollouts:
        slot = model.ledger[batch.batch_id]
        assert (batch.policy_version, batch.weights_digest) == (model.version, model.digest)
        group_size = slot.prompt_batch.group_size
        assert [len(group.rollouts) for group in batch.groups] == [group_size] * len(slot.prompt_batch.prompts)
        assert batch_digest(batch) == slot.digest


def check_ledger(held: Held, model: ServerModel) -> None:
    """I3: the ledger says of each expected batch what became of it."""
    assert {key: word_of(one) for key, one in held.ledger.items()} == {
        key: slot.status for key, slot in model.ledger.items()
    }
    for key, slot in model.ledger.items():
        one = held.ledger[key]
        if isinstance(one, Published):
            assert (one.digest, one.generator, one.attempt) == (slot.digest, slot.generator, slot.attempt)
        elif isinstance(one, Expected):
            assert one.hedger == slot.entry.hedger


def check_prompts(held: Held, model: ServerModel) -> None:
    """I5: what is neither published nor dead is on the stream, undelivered or leased, unless the server lost it."""
    assert [(batch_id, attempt) for _, batch_id, attempt in held.prompts] == [
        (entry.batch_id, entry.first_attempt) for entry in model.entries
    ]
    for entry, (entry_id, _, _) in zip(model.entries, held.prompts, strict=True):
        entry.entry_id = entry_id
    assert held.leases == [
        (entry.entry_id, entry.generator, entry.deliveries) for entry in model.entries if entry.generator
    ]


def check_claims(held: Held) -> None:
    """The index of what may be hedged is the ledger's: leased to a first holder, and copied by nobody."""
    first_holders = {entry_id for entry_id, _, deliveries in held.leases if deliveries == 1}
    may_be_hedged = {
        batch_id: one.claimed_ms
        for batch_id, one in held.ledger.items()
        if isinstance(one, Expected) and one.holder and not one.hedger and one.entry in first_holders
    }
    there = {entry_id for entry_id, _, _ in held.prompts}
    lost = {batch_id for batch_id, one in held.ledger.items() if isinstance(one, Dead) or one.entry not in there}
    assert {key: at_ms for key, at_ms in held.claims.items() if key not in lost} == may_be_hedged


def check_record(held: Held, model: ServerModel) -> None:
    """Every refusal, failure, commit and rewind is on record; I4: a commit follows the last, or a recorded rewind."""
    assert held.counters == dict(model.counters)
    assert held.dead == model.dead
    assert [(one.kind, one.iteration, one.trainer_epoch) for one in held.audit] == model.audit
    following = 0
    for one in held.audit:
        assert one.iteration == following if one.kind == "commit" else one.iteration <= following
        following = one.iteration + (one.kind == "commit")


CHECKS = (check_fence, check_rollouts, check_ledger, check_prompts, check_record)
