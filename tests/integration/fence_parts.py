"""What tests of the fence write past it, and brokers that lose answers."""

from __future__ import annotations

import hashlib
from typing import Any

from msgspec.structs import replace

from broker.connection.client import Broker
from broker.fence import WindowEntry
from broker.keys import STAGE_BAND, JobKeys, item_fields
from broker.ledger import LastClaim
from contracts.encoding.wire import decode, encode
from contracts.errors import BrokerUnavailable


def weights_digest(version: int, variant: int) -> str:
    """A replay after a rewind may make other weights."""
    return hashlib.blake2b(f"{version} {variant}".encode(), digest_size=32).hexdigest()


def change_fence(
    broker: Broker, keys: JobKeys, *, is_open: bool = True, committed: int | None = None, **changes: int
) -> None:
    """As if the open iterations were others, or none: `changes` are of the fields of each."""
    packed: Any = broker.redis.hget(keys.fence, "window")
    window = [replace(one, **changes) for one in decode(packed, list[WindowEntry])] if is_open else []
    broker.redis.hset(keys.fence, "window", encode(window))
    if committed is not None:
        broker.redis.hset(keys.fence, "committed", committed)


def set_claim_times(broker: Broker, keys: JobKeys, batch_id: str, *, iteration: int = 0, **times_ms: int) -> None:
    """As if the batch had been claimed, or hedged, at these server times."""
    slot, field = keys.slot_of(iteration), item_fields(0, batch_id, 0).claim
    held: Any = broker.redis.hget(slot.items, field)
    broker.redis.hset(slot.items, field, encode(replace(decode(held, LastClaim), **times_ms)))
    if "claimed_ms" in times_ms:
        broker.redis.zadd(slot.claims, {batch_id: times_ms["claimed_ms"]}, xx=True)


def set_fault(broker: Broker, keys: JobKeys, batch_id: str, words: str, *, stage: int = 0, item: int = 0) -> None:
    """As if an attempt of the item before the one that holds it had failed by these words."""
    slot, field = keys.slot_of(int(batch_id.partition("/")[0])), item_fields(stage, batch_id, item).claim
    held: Any = broker.redis.hget(slot.items, field)
    broker.redis.hset(slot.items, field, encode(replace(decode(held, LastClaim), fault=words)))


def let_expire(broker: Broker, keys: JobKeys, batch_id: str, *, iteration: int = 0) -> None:
    """As if its generator had not renewed this lease for very long."""
    broker.redis.zadd(keys.slot_of(iteration).work, {item_fields(0, batch_id, 0).member: 1}, xx=True)


def let_live(broker: Broker, keys: JobKeys, batch_id: str, *, iteration: int = 0) -> None:
    """As if its generator had just renewed this lease, for an hour."""
    ends_ms = int(1000 * (broker.now_s() + 3600))
    broker.redis.zadd(keys.slot_of(iteration).work, {item_fields(0, batch_id, 0).member: ends_ms}, xx=True)


def end_leases(broker: Broker, keys: JobKeys, *, iteration: int = 0) -> None:
    """As if no holder of anything of the iteration had renewed its lease for very long."""
    work = keys.slot_of(iteration).work
    ends: Any = broker.redis.zrange(work, 0, -1, withscores=True)
    for member, score in ends:
        if (ends_ms := score % STAGE_BAND) >= 1:
            broker.redis.zadd(work, {member: score - ends_ms + 1})


def lose_prompts(broker: Broker, keys: JobKeys, batch_id: str, *, iteration: int = 0) -> None:
    """As if the batch had never been put in work, though the ledger expects it."""
    slot = keys.slot_of(iteration)
    broker.redis.zrem(slot.work, item_fields(0, batch_id, 0).member)
    broker.redis.hdel(slot.prompts, batch_id)


def set_typical_time(broker: Broker, keys: JobKeys, typical_s: float) -> None:
    """As if the latest publications had all taken this long."""
    set_recent_times(broker, keys, [int(typical_s * 1000)])


def set_recent_times(broker: Broker, keys: JobKeys, recent_ms: list[int]) -> None:
    broker.redis.hset(keys.progress, "recent_ms", encode(recent_ms))


def recent_times(broker: Broker, keys: JobKeys) -> list[int]:
    """Milliseconds of the latest publications, the newest first."""
    recent: Any = broker.redis.hget(keys.progress, "recent_ms")
    return decode(recent, list[int])


class AnswerLosingBroker(Broker):
    """Loses answers on demand: the command runs, and its caller hears of an outage."""

    loses_next_answer = False

    def run(self, function: str, *payloads: str | int | bytes, **told: Any) -> list[Any]:
        answer = super().run(function, *payloads, **told)
        if self.loses_next_answer:
            self.loses_next_answer = False
            self.lost = answer
            raise BrokerUnavailable("the answer was lost")
        return answer
