"""The report of a job in Redis at one moment: fence, streams, leases and counters. It only reads.

Streams are counted by us: what the server calls the lag of a group counts deleted entries, or isn't known after them,
and would show a backlog where there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from fastapi import APIRouter, Response
from msgspec import UNSET, UnsetType

from broker.connection.client import Broker
from broker.fence import read_fence
from broker.job_store import unknown_job
from broker.keys import STAGE_BAND, TRAINER_GROUP, JobKeys, OpenKeys, SlotKeys, item_fields, num_open_of
from broker.ledger import BatchRecord, Expected, Published, read_of, readable
from broker.monitor import ask_missing, counted, seconds, with_lost
from broker.presence import Presence
from contracts.encoding.wire import Record, decode
from contracts.errors import ContractViolation
from contracts.jobs import JobCounts
from contracts.monitor import GeneratorSeen, StageWorkerSeen
from contracts.spec.job import JobSpec
from gateway import openapi
from gateway.metrics.stage_report import StageLease, StageState, last_claims, of_stages
from gateway.services import HasServices, KnownJob
from onbeat.base.http.bodies import json_answer

router = APIRouter(prefix="/v1", tags=["jobs"])
MAX_LEASES = 1000
KEPT_STREAMS = ("dead", "audit", "events")
"""Streams of the job; those of the window are `rollouts`, one for each slot, with the hashes `prompts` beside them."""


class StreamState(Record, frozen=True, kw_only=True):
    """The state of a job's stream, or of its batches for generators, which are a hash.

    `prompts` and `rollouts` are those of all open iterations together.
    """

    name: str
    """prompts, rollouts, dead, audit or events; `RedisKeys` says what each of them is in Redis."""
    num_entries: int
    num_pending: int
    """Delivered to a consumer and not yet acknowledged, of prompts leased by a generator; 0 for a stream from which no
    process claims."""
    num_waiting: int
    """Not delivered to any consumer yet. We count them: the server's own lag is unknown after deletes."""
    oldest_age_s: float | None = None
    """Age of the oldest batch of an open iteration that lies on the stream; None where there is none."""
    memory_bytes: int
    """Memory of the whole key on the server."""


class RedisKeys(Record, frozen=True, kw_only=True):
    """The keys of Redis that a part of a job is, for a look at them by redis-cli."""

    name: str
    """As the keys' table calls it: prompts, work, ledger, rollouts, dead, audit or events."""
    type: str
    """The answer of Redis' command TYPE: stream, hash or zset, a sorted set."""
    pattern: str
    """A pattern for `redis-cli --scan --pattern`, which matches no other keys. A `*` before the job's id stands
    for the seal, a secret that no answer shows."""


class PromptLease(Record, frozen=True, kw_only=True):
    """A prompt batch that a generator works on."""

    batch_id: str
    generator_id: str
    idle_s: float
    """Since its last heartbeat."""
    deliveries: int
    """Its attempt: 1 unless a lease expired, or a generator failed."""


class StreamReport(JobCounts, frozen=True, kw_only=True):
    """The state of a job at one moment: its fence, its streams, its leases, and what was counted over the whole job."""

    fence_state: str
    """open, closed, or "" before the first iteration."""
    iteration: int
    """The newest open or the last iteration; -1 before the first."""
    trainer_lease_s: float | None = None
    """Until the trainer's lease ends; None while no trainer holds the job."""
    accepted_bytes: int
    """Encoded size of the publications that the fence accepted, over the whole job."""
    batches_failed: int = 0
    """Attempts that a generator gave back with a reason."""
    batches_redispatched: int = 0
    """Batches that a restarted server had lost."""
    rewinds: int = 0
    """Times that a trainer resumed from before the fence."""
    versions_proved: int = 0
    """Versions that engines have shown the trainer's log-probs of, one of each engine."""
    proofs_far: int = 0
    """Versions that an engine computes too far from the trainer."""
    proofs_stale: int = 0
    """Versions of which an engine shows the log-probs of the version before."""
    proofs_not_finite: int = 0
    """Versions of which an engine has log-probs that are not finite."""
    proofs_untold: int = 0
    """Proved versions whose step is smaller than the engine's noise, so that they may be the version before."""
    streams: tuple[StreamState, ...] = ()
    redis_keys: tuple[RedisKeys, ...] = ()
    leases: tuple[PromptLease, ...] = ()
    """Oldest iteration first, and in it the oldest entry; the first thousand."""
    generators: tuple[GeneratorSeen, ...] = ()
    rows_waiting: int | UnsetType = UNSET
    """Published rows that lack columns, in all open iterations; this and what follows stands in reports of jobs with
    stages alone."""
    columns_bytes: int | UnsetType = UNSET
    """Memory of what waits for columns, and of the columns, on the server."""
    stages: tuple[StageState, ...] | UnsetType = UNSET
    """In the order of the spec."""
    stage_leases: tuple[StageLease, ...] | UnsetType = UNSET
    """The first thousand."""
    stage_workers: tuple[StageWorkerSeen, ...] | UnsetType = UNSET


@router.get("/jobs/{job_id}/streams", **openapi.answers(openapi.record(StreamReport)))
def streams(job_id: KnownJob, services: HasServices) -> Response:
    """Show the job's batches and streams in Redis: lengths, ages, leases, rejections, bytes, and their keys."""
    return json_answer(stream_report(services.broker, job_id))


def stream_report(broker: Broker, job_id: str) -> StreamReport:
    """The job's streams at one moment. Raises NotFound, and ContractViolation for a job of which something else stands
    there."""
    with broker.call():
        spec: Any = broker.redis.get(OpenKeys(job_id).spec)
    keys = broker.job_keys(job_id, num_open_of(spec) if spec else 1)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.hexists(keys.job, "state").hgetall(keys.counters).xrevrange(keys.audit, count=1).time()
        ask_missing(pipe, keys)
        for name in KEPT_STREAMS:
            pipe.xlen(getattr(keys, name)).memory_usage(getattr(keys, name))
        for slot in keys.slots:
            _ask_slot(pipe, slot)
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        # A stream that was never opened has no group: that is a count of 0, not an error.
        if isinstance(answer, Exception) and not str(answer).startswith("NOGROUP"):
            raise answer
    exists, counters, last_audit, clock, missing, *rest = answers
    if not exists:
        raise unknown_job(job_id)
    with read_of(job_id):
        sizes = rest[: 2 * len(KEPT_STREAMS)]
        of_slots = rest[2 * len(KEPT_STREAMS) :]
        now_s = seconds(clock)
        fence = read_fence(broker, keys)
        slots = [_slot_state(of_slots[at : at + SLOT_ANSWERS], now_s) for at in range(0, len(of_slots), SLOT_ANSWERS)]
        states = (
            StreamState(
                name=name, num_entries=num_entries, num_pending=0, num_waiting=0, memory_bytes=memory_bytes or 0
            )
            for name, num_entries, memory_bytes in zip(KEPT_STREAMS, sizes[0::2], sizes[1::2], strict=True)
        )
        in_order = [opened.iteration % len(slots) for opened in fence.window]
        leases = (lease for at in in_order for lease in _leases(broker, keys.slots[at], slots[at].leases, now_s))
        lease_s = fence.lease_until_s - now_s
        return StreamReport(
            job_id=job_id,
            fence_state=fence.state,
            iteration=fence.iteration,
            max_policy_lag=len(keys.slots) - 1,
            trainer_lease_s=round(lease_s, 3) if lease_s > 0 else None,
            streams=(_sum([slot.prompts for slot in slots]), _sum([slot.rollouts for slot in slots]), *states),
            leases=tuple(islice(leases, MAX_LEASES)),
            generators=tuple(Presence(broker).live()),
            redis_keys=redis_keys(job_id),
            **counted(StreamReport, fence, last_audit, with_lost(counters, missing, now_s)),
            **_stages(broker, job_id, spec),
        )


REDIS_TYPES = {
    "prompts": "hash",
    "work": "zset",
    "ledger": "hash",
    "rollouts": "stream",
    "dead": "stream",
    "audit": "stream",
    "events": "stream",
}
"""Part of a job → the type of its keys (broker/keys.py); the first four have a key for each open iteration."""


def redis_keys(job_id: str) -> tuple[RedisKeys, ...]:
    """Returns the keys of each part of the job. Raises NotFound for what is no job's id."""
    keys = JobKeys(job_id, seal="*")
    (slot,) = keys.slots
    patterns = {
        name: f"{getattr(slot, name)}*" if name in SlotKeys._fields else getattr(keys, name) for name in REDIS_TYPES
    }
    return tuple(RedisKeys(name=name, type=kind, pattern=patterns[name]) for name, kind in REDIS_TYPES.items())


def _stages(broker: Broker, job_id: str, packed: bytes | None) -> dict[str, Any]:
    """The fields of a report on a job with stages; {} of any other."""
    with contextlib.suppress(ContractViolation):  # of an older version: a report shows what it can
        spec = decode(packed, JobSpec) if packed else None
        if spec is not None and spec.stages:
            return of_stages(broker, job_id, spec)
    return {}


SLOT_ANSWERS = 8
"""The number of commands of `_ask_slot`, each of which has an answer."""


def _ask_slot(pipe: Any, slot: SlotKeys) -> None:
    leased = (slot.work, 1, f"({STAGE_BAND}")
    pipe.hgetall(slot.ledger).zrange(*leased, byscore=True, offset=0, num=MAX_LEASES, withscores=True)
    pipe.hlen(slot.prompts).memory_usage(slot.prompts).zcount(*leased)
    pipe.xlen(slot.rollouts).memory_usage(slot.rollouts).xpending(slot.rollouts, TRAINER_GROUP)


class _Slot(NamedTuple):
    """The batches and leases of an open iteration."""

    prompts: StreamState
    rollouts: StreamState
    leases: list[tuple[bytes, float]]
    """(name in `work`, ms of its end) of each."""


def _slot_state(answers: Sequence[Any], now_s: float) -> _Slot:
    ledger, leases, *sizes = answers
    batches: list[Any] = [readable(value, BatchRecord) for value in ledger.values()]  # type: ignore[arg-type]
    sent_ms = [record.sent_ms for record in batches if isinstance(record, Expected)]
    entries = [record.entry for record in batches if isinstance(record, Published) and record.entry]
    return _Slot(
        prompts=_stream_state("prompts", sizes[:3], sent_ms, now_s),
        rollouts=_stream_state("rollouts", sizes[3:], [int(entry.partition("-")[0]) for entry in entries], now_s),
        leases=leases,
    )


def _stream_state(name: str, sizes: Sequence[Any], times_ms: Sequence[int], now_s: float) -> StreamState:
    num_entries, memory_bytes, pending = sizes
    if not isinstance(pending, int):  # of a stream; an error where it has no group
        pending = 0 if isinstance(pending, Exception) else pending["pending"]
    oldest_ms = min(times_ms, default=None)
    return StreamState(
        name=name,
        num_entries=num_entries,
        num_pending=pending,
        # An entry is deleted in the script that settles it, so what is not pending was never handed out.
        num_waiting=num_entries - pending,
        oldest_age_s=None if oldest_ms is None else round(max(0.0, now_s - oldest_ms / 1000), 3),
        memory_bytes=memory_bytes or 0,
    )


def _sum(of_slots: Sequence[StreamState]) -> StreamState:
    """The streams of one name over the window."""
    ages_s = [state.oldest_age_s for state in of_slots if state.oldest_age_s is not None]
    numbers = ("num_entries", "num_pending", "num_waiting", "memory_bytes")
    sums = {name: sum(getattr(state, name) for state in of_slots) for name in numbers}
    return StreamState(name=of_slots[0].name, oldest_age_s=max(ages_s, default=None), **sums)


def _leases(broker: Broker, slot: SlotKeys, leases: Sequence[tuple[bytes, float]], now_s: float) -> list[PromptLease]:
    ids = [member[2:-2].decode(errors="replace") for member, _ in leases]
    claims = last_claims(broker, [(slot, item_fields(0, batch_id, 0).claim) for batch_id in ids])
    return [
        PromptLease(
            batch_id=batch_id,
            generator_id=claim.worker,
            idle_s=max(0.0, now_s - (end_ms - claim.lease_ms) / 1000),
            deliveries=claim.attempt,
        )
        for batch_id, claim, (_, end_ms) in zip(ids, claims, leases, strict=True)
        if claim is not None
    ]
