"""Says for which batch of an open iteration a trainer waits: who has it, since when, and why it isn't there yet.

    the newest setback of a batch that isn't settled     who gave it back, and with which words
    a claim that lasts for longer than batches do        who holds it, since when, and what that process says it does
    a batch that no generator has claimed                since when

It reads a handful of fields, however many batches there are: a job's status is asked for each second.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from broker.connection.client import Broker
from broker.fence import FenceState
from broker.keys import JobKeys, SlotKeys, item_fields
from broker.ledger import BatchRecord, Dead, Expected, LastClaim, Published, Setback, readable
from contracts.jobs import WindowIteration
from contracts.monitor import GeneratorSeen

PATIENCE_S = 10.0
"""A claim, or a batch that is free, is worth a word from then on."""
LONG = 3.0
"""And a claim only where it lasts so many times as long as the latest batches took from their claim to publication."""
LAST_TURN = 0.5
"""As in scripts/prelude.lua: the scores of free batches in `work` are not beyond it."""
MOST_SHOWN = 400
"""Characters of a reason."""


def awaited_batch(
    broker: Broker, keys: JobKeys, fence: FenceState, *, live: Sequence[GeneratorSeen], now_s: float
) -> str:
    """Says what the oldest open iteration waits for, in words; "" where nothing of it lasts for long.

    Args:
        broker: The broker.
        keys: The job's keys, with all of its slots.
        fence: The job's fence.
        live: The live generators.
        now_s: Unix time by the server's clock.
    """
    if not fence.window or not _lacks_batches(fence.window[0]):
        return ""
    oldest = fence.window[0]
    slot = keys.slot_of(oldest.iteration)
    setback = fence.setback
    if setback is not None and setback.iteration != oldest.iteration:
        setback = None
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.zrange(slot.claims, 0, 0, withscores=True)
        pipe.zrange(slot.work, 0, LAST_TURN, byscore=True, offset=0, num=1)
        pipe.hget(slot.ledger, setback.batch_id if setback else "")
        claims, free, record = pipe.execute()
    if setback is not None and _is_open(record, setback):
        return _after(setback)
    if claims:
        (batch_id, claimed_ms), *_ = claims
        held_s = now_s - claimed_ms / 1000
        if held_s >= _patience_s(fence):
            return _holder_text(broker, slot, batch_id.decode(errors="replace"), claimed_s=claimed_ms / 1000, live=live)
    elif free:
        return _unclaimed(broker, slot, free[0].decode(errors="replace"), now_s=now_s)
    return ""


def _lacks_batches(opened: WindowIteration) -> bool:
    return opened.batches_published + opened.batches_dead < opened.batches_expected


def _patience_s(fence: FenceState) -> float:
    if not fence.recent_ms:
        return PATIENCE_S
    return max(PATIENCE_S, LONG * statistics.median(fence.recent_ms) / 1000)


def _is_open(record: bytes | None, setback: Setback) -> bool:
    """Returns True where the batch still lacks what was given back: its rollouts, or columns."""
    batch: Any = readable(record, BatchRecord)  # type: ignore[arg-type]
    if isinstance(batch, Published):
        return setback.stage > 0 and batch.left > 0
    return batch is not None and not isinstance(batch, Dead)


def _after(setback: Setback) -> str:
    """Describes a batch that was given back: `batch 3/train/2, which g1 gave back at attempt 1: KeyError: 'layers'`."""
    how = "gave back" if setback.is_released else f"failed at attempt {setback.attempt}"
    reason = " ".join(setback.reason.split())[:MOST_SHOWN]
    return f"batch {setback.batch_id}, which {setback.worker} {how}, and which is tried again: {reason}"


def _holder_text(
    broker: Broker, slot: SlotKeys, batch_id: str, *, claimed_s: float, live: Sequence[GeneratorSeen]
) -> str:
    with broker.call():
        value: Any = broker.redis.hget(slot.items, item_fields(0, batch_id, 0).claim)
    claim = readable(value, LastClaim)
    if claim is None or not claim.worker:
        return ""
    doing = next((f", and says: {seen.doing}" for seen in live if seen.worker_id == claim.worker and seen.doing), "")
    if claim.worker not in {seen.worker_id for seen in live}:
        doing = ", and no longer lives: the batch goes to another when its lease is over"
    return f"batch {batch_id}, which {claim.worker} has held since {_clock(claimed_s)} (attempt {claim.attempt}){doing}"


def _unclaimed(broker: Broker, slot: SlotKeys, member: str, *, now_s: float) -> str:
    batch_id = member.partition("/")[2].rpartition("/")[0]
    with broker.call():
        value: Any = broker.redis.hget(slot.ledger, batch_id)
    record: Any = readable(value, BatchRecord)  # type: ignore[arg-type]
    if not isinstance(record, Expected) or now_s - record.sent_ms / 1000 < PATIENCE_S:
        return ""
    return f"batch {batch_id}, which no generator has claimed since {_clock(record.sent_ms / 1000)}"


def _clock(at_s: float) -> str:
    """Returns a time that doesn't change from one look to the next, as seconds ago would."""
    return time.strftime("%H:%M:%S UTC", time.gmtime(at_s))
