"""The report of a job's stages at one moment: backlogs, leases, ages, memory. Nothing here writes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from broker.connection.client import Broker
from broker.keys import STAGE_BAND, SlotKeys, item_fields
from broker.ledger import LastClaim, Published, readable
from broker.presence import StagePresence
from contracts.encoding.wire import Record
from contracts.spec.job import JobSpec

MAX_ITEMS = 10_000
"""Items of an iteration whose ages and leases are looked at; their numbers are exact."""
MAX_LEASES = 1000
MEMBER = re.compile(rb"(\d{1,4})/(\d{1,9}/(?:train|evaluation)/\d{1,9})/(\d{1,9})")
"""A member of `work`."""
T = TypeVar("T")


class StageState(Record, frozen=True, kw_only=True):
    """A stage of the job, over all open iterations. An item is the rows of a batch that the stage takes together."""

    stage: str
    num_free: int
    """Items that have their inputs and wait for a worker: the backlog."""
    num_leased: int
    """Items that a worker holds."""
    oldest_age_s: float | None = None
    """Since the publication of the oldest batch with such an item; None where there is none."""
    num_workers: int
    """Live stage workers that serve it."""
    rows_made: int
    """Rows that got their columns, over the whole job, like the next two."""
    items_failed: int
    """Attempts that a worker gave back with a reason."""
    items_reclaimed: int
    """Leases that expired and went to another worker."""


class StageLease(Record, frozen=True, kw_only=True):
    """An item that a stage worker works on."""

    stage: str
    batch_id: str
    item: int
    worker_id: str
    attempt: int
    age_s: float
    """Since its claim."""
    lease_s: float
    """Until its lease ends without a heartbeat; 0.0 where it is over."""


class _Item(NamedTuple):
    """An item of `work`."""

    stage: int
    """Its index in the spec."""
    batch_id: str
    number: int
    lease_ms: int
    """End of its lease; 0 where it is free."""
    staged_ms: int
    slot: SlotKeys


def of_stages(broker: Broker, job_id: str, spec: JobSpec) -> dict[str, Any]:
    """Returns the fields of a StreamReport that describe the stages of a job that has stages."""
    keys = broker.job_keys(job_id, spec.num_open)
    num_stages = len(spec.stages)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.time().hgetall(keys.counters).hmget(keys.progress, [f"waiting:{slot}" for slot in range(spec.num_open)])
        for slot in keys.slots:
            pipe.memory_usage(slot.items).hgetall(slot.ledger).zrange(
                slot.work, STAGE_BAND, "+inf", byscore=True, offset=0, num=MAX_ITEMS, withscores=True
            )
            for stage in range(1, num_stages + 1):
                pipe.zcount(slot.work, stage * STAGE_BAND, stage * STAGE_BAND)
                pipe.zcount(slot.work, stage * STAGE_BAND + 1, (stage + 1) * STAGE_BAND - 1)
        (seconds, micros), counters, waiting, *rest = pipe.execute()
    now_ms = seconds * 1000 + micros // 1000
    width = 3 + 2 * num_stages
    of_slots = [rest[at : at + width] for at in range(0, len(rest), width)]
    items = [
        item
        for slot, (_, ledger, work, *_) in zip(keys.slots, of_slots, strict=True)
        for item in _items(slot, ledger, work)
        if item.stage < num_stages
    ]
    counts = [sum(numbers) for numbers in zip(*(answers[3:] for answers in of_slots), strict=True)]
    live = StagePresence(broker).live()
    return {
        "rows_waiting": sum(int(rows or 0) for rows in waiting),
        "columns_bytes": sum(answers[0] or 0 for answers in of_slots),
        "stages": tuple(
            StageState(
                stage=stage.name,
                num_free=counts[2 * index],
                num_leased=counts[2 * index + 1],
                oldest_age_s=_oldest_age_s((item for item in items if item.stage == index), now_ms),
                num_workers=sum(worker.is_for(job_id, stage) for worker in live),
                rows_made=_counter(counters, f"stage_rows:{index + 1}"),
                items_failed=_counter(counters, f"stage_failed:{index + 1}"),
                items_reclaimed=_counter(counters, f"stage_reclaimed:{index + 1}"),
            )
            for index, stage in enumerate(spec.stages)
        ),
        "stage_leases": _leases(broker, [item for item in items if item.lease_ms][:MAX_LEASES], spec, now_ms),
        "stage_workers": tuple(live),
    }


def _items(slot: SlotKeys, ledger: Mapping[bytes, bytes], work: Sequence[tuple[bytes, float]]) -> list[_Item]:
    batches = {batch_id.decode(errors="replace"): readable(value, Published) for batch_id, value in ledger.items()}
    staged = {batch_id: batch.staged_ms for batch_id, batch in batches.items() if batch}
    items = []
    for member, score in work:
        parts = MEMBER.fullmatch(member)
        if parts is None or not math.isfinite(score):
            continue  # generators and stage workers may write there: a report shows what it can
        stage = int(parts[1])
        batch_id = parts[2].decode()
        number = int(parts[3])
        items.append(_Item(stage - 1, batch_id, number, int(score) - stage * STAGE_BAND, staged.get(batch_id, 0), slot))
    return items


def _oldest_age_s(items: Iterable[_Item], now_ms: int) -> float | None:
    oldest_ms = min((item.staged_ms for item in items), default=None)
    return None if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000


def _leases(broker: Broker, leased: Sequence[_Item], spec: JobSpec, now_ms: int) -> tuple[StageLease, ...]:
    claims = last_claims(
        broker, [(item.slot, item_fields(item.stage + 1, item.batch_id, item.number).claim) for item in leased]
    )
    return tuple(
        StageLease(
            stage=spec.stages[item.stage].name,
            batch_id=item.batch_id,
            item=item.number,
            worker_id=claim.worker,
            attempt=claim.attempt,
            age_s=max(0, now_ms - claim.claimed_ms) / 1000,
            lease_s=max(0, item.lease_ms - now_ms) / 1000,
        )
        for item, claim in zip(leased, claims, strict=True)
        if claim is not None
    )


def last_claims(broker: Broker, fields: Sequence[tuple[SlotKeys, str]]) -> list[LastClaim | None]:
    """Returns the last claim of each field; None where it is gone, or no script of this version has written it."""
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        for slot, field in fields:
            pipe.hget(slot.items, field)
        return [readable(value, LastClaim) for value in pipe.execute()]


def _counter(counters: Mapping[bytes, bytes], name: str) -> int:
    return int(counters.get(name.encode(), 0))
