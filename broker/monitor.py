"""What a job looks like from outside: its status, and one moment of its streams. Nothing here writes to a job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from redis import exceptions

from broker.connection.client import Broker
from broker.job_store import unknown_job
from broker.keys import GENERATOR_GROUP, TRAINER_GROUP, JobKeys
from broker.ledger import Expected, Published, batch_record
from broker.presence import Presence
from broker.trainer_side import FenceState, read_fence
from contracts.encoding.wire import decode
from contracts.errors import ContractViolation
from contracts.events import AuditRecord
from contracts.jobs import EvaluationScore, JobState, JobStatus
from contracts.monitor import GeneratorSeen, PromptLease, StreamReport, StreamState
from contracts.spec import JobSpec

REJECTED = "rejected:"
COUNTERS = {
    "batches_accepted": "accepted",
    "accepted_bytes": "accepted_bytes",
    "batches_reclaimed": "reclaimed",
    "batches_hedged": "hedged",
    "hedges_won": "hedges_won",
    "batches_failed": "failed",
    "batches_dead": "dead",
    "batches_redispatched": "redispatched",
    "rewinds": "rewinds",
}
"""Field of a status or a report → its counter."""
MAX_LEASES = 1000
CLAIMED_STREAMS = {"prompts": GENERATOR_GROUP, "rollouts": TRAINER_GROUP}
STREAMS = ("prompts", "rollouts", "dead", "audit", "events")


def job_status(broker: Broker, job_id: str, *, live_generators: int | None = None) -> JobStatus:
    """Raises NotFound.

    live_generators: their number, where a caller that asks for many jobs knows it already.
    """
    keys = JobKeys(job_id)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=True)
        pipe.hgetall(keys.job).get(keys.spec).hgetall(keys.counters)
        pipe.xrevrange(keys.audit, count=1).time().info("memory")
        job, spec, counters, last_audit, clock, memory = pipe.execute()
    if b"state" not in job or spec is None:
        raise unknown_job(job_id)
    if live_generators is None:
        live_generators = len(Presence(broker).live())
    spec = decode(spec, JobSpec)
    values = {name.decode(): value for name, value in job.items()}
    fence = read_fence(broker, keys)
    state, is_open = JobState(values["state"].decode()), fence.state == "open"
    last_record = decode(last_audit[0][1][b"record"], AuditRecord) if last_audit else None
    version, digest = _newest_version(fence, last_record)
    reason = values["reason"].decode() or _waits_for(
        state, fence, live_generators=live_generators, now_s=_seconds(clock), is_full=_is_full(memory)
    )
    return JobStatus(
        job_id=job_id,
        name=spec.name,
        state=state,
        reason=reason,
        schedule=spec.schedule,
        iterations=spec.iterations,
        # The last opened iteration may only evaluate: it trains nothing.
        iterations_committed=min(fence.committed + 1, spec.iterations),
        policy_version=version,
        weights_digest=digest,
        created_s=float(values["created_s"]),
        started_s=float(values.get("started_s", 0.0)),
        ended_s=float(values.get("ended_s", 0.0)),
        run_directory=job_id,
        trainer_epoch=fence.trainer_epoch,
        batches_expected=fence.expected if is_open else 0,
        batches_published=fence.published if is_open else 0,
        live_generators=live_generators,
        evaluation_before=_score(values.get("evaluation_before")),
        evaluation_latest=_score(values.get("evaluation_latest")),
        **_counted(counters, JobStatus),
    )


def stream_report(broker: Broker, job_id: str) -> StreamReport:
    """The job's streams at one moment. Raises NotFound."""
    keys = JobKeys(job_id)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=True)
        pipe.hexists(keys.job, "state").hgetall(keys.counters).hgetall(keys.ledger).time()
        pipe.xpending_range(keys.prompts, GENERATOR_GROUP, "-", "+", MAX_LEASES)
        for name in STREAMS:
            pipe.xlen(getattr(keys, name)).memory_usage(getattr(keys, name))
        for name, group in CLAIMED_STREAMS.items():
            pipe.xpending(getattr(keys, name), group)
        exists, counters, ledger, clock, pending, *rest = pipe.execute(raise_on_error=False)
        for answer in (exists, counters, ledger, clock, pending, *rest):
            _raise_unless_no_group(answer)
    if not exists:
        raise unknown_job(job_id)
    entries = _ledger_entries(ledger)
    sizes, summaries = rest[: 2 * len(STREAMS)], rest[2 * len(STREAMS) :]
    num_pending = {
        name: 0 if isinstance(summary, Exception) else summary["pending"]
        for name, summary in zip(CLAIMED_STREAMS, summaries, strict=True)
    }
    now_s, fence = _seconds(clock), read_fence(broker, keys)
    lease_s = fence.lease_until_s - now_s
    streams = tuple(
        _stream_state(
            name,
            num_entries=sizes[2 * index],
            num_pending=num_pending.get(name, 0),
            memory_bytes=sizes[2 * index + 1] or 0,
            entry_ids=entries.get(name, {}),
            now_s=now_s,
        )
        for index, name in enumerate(STREAMS)
    )
    return StreamReport(
        job_id=job_id,
        fence_state=fence.state,
        iteration=fence.iteration,
        policy_version=fence.policy_version,
        weights_digest=fence.weights_digest,
        trainer_epoch=fence.trainer_epoch,
        trainer_lease_s=round(lease_s, 3) if lease_s > 0 else None,
        batches_expected=fence.expected,
        batches_published=fence.published,
        streams=streams,
        leases=() if isinstance(pending, Exception) else _leases(pending, entries["prompts"]),
        generators=_generators(broker, now_s),
        **_counted(counters, StreamReport),
    )


def _newest_version(fence: FenceState, last_record: AuditRecord | None) -> tuple[int, str]:
    """The newest version that a commit made: the open iteration samples it; after the last one, nothing does."""
    if fence.state != "open" and last_record is not None and last_record.next_weights_digest:
        return last_record.policy_version + 1, last_record.next_weights_digest
    return fence.policy_version, fence.weights_digest


def _waits_for(state: JobState, fence: FenceState, *, live_generators: int, now_s: float, is_full: bool) -> str:
    if state is JobState.RUNNING and is_full:
        return "waits for room in Redis, which is at maxmemory: raise it, or end jobs"
    if state is JobState.QUEUED:
        return "waits for a trainer"
    if state is JobState.RUNNING and fence.lease_until_s <= now_s:
        return "waits for a trainer to take over"
    if state is JobState.RUNNING and fence.state == "open" and not live_generators:
        return "waits for a generator"
    return ""


def _stream_state(
    name: str, *, num_entries: int, num_pending: int, memory_bytes: int, entry_ids: Iterable[str], now_s: float
) -> StreamState:
    oldest_ms = min((int(entry_id.partition("-")[0]) for entry_id in entry_ids), default=None)
    return StreamState(
        name=name,
        num_entries=num_entries,
        num_pending=num_pending,
        # An entry is deleted in the script that acknowledges it, so what is not pending was never delivered.
        num_waiting=num_entries - num_pending if name in CLAIMED_STREAMS else 0,
        oldest_age_s=None if oldest_ms is None else round(max(0.0, now_s - oldest_ms / 1000), 3),
        memory_bytes=memory_bytes,
    )


def _ledger_entries(ledger: Mapping[bytes, bytes]) -> dict[str, dict[str, str]]:
    """Stream → entry id → batch id of the open iteration, without reading the entries, whose payloads are large."""
    prompts: dict[str, str] = {}
    rollouts: dict[str, str] = {}
    for batch_id, value in ledger.items():
        with contextlib.suppress(ContractViolation):  # of an older version: a report shows what it can
            match batch_record(value):
                case Expected(entry=entry):
                    prompts[entry] = batch_id.decode()
                case Published(entry=entry):
                    rollouts[entry] = batch_id.decode()
    return {"prompts": prompts, "rollouts": rollouts}


def _leases(pending: list[dict[str, Any]], batch_ids: Mapping[str, str]) -> tuple[PromptLease, ...]:
    return tuple(
        PromptLease(
            batch_id=batch_ids.get(row["message_id"].decode(), ""),
            generator_id=row["consumer"].decode(),
            idle_s=row["time_since_delivered"] / 1000,
            deliveries=row["times_delivered"],
        )
        for row in pending
    )


def _generators(broker: Broker, now_s: float) -> tuple[GeneratorSeen, ...]:
    return tuple(
        GeneratorSeen(
            generator_id=live.generator_id, seen_s=round(max(0.0, now_s - live.seen_s), 3), info=dict(live.info)
        )
        for live in Presence(broker).live()
    )


def _is_full(memory: Mapping[str, int]) -> bool:
    """Whether the server refuses writes that need memory; buffers of replicas and of the file don't count."""
    used = memory["used_memory"] - memory.get("mem_not_counted_for_evict", 0)
    return 0 < memory["maxmemory"] <= used


def _raise_unless_no_group(answer: object) -> None:
    """A stream that was never opened has no group: that is a count of 0, not an error."""
    if isinstance(answer, exceptions.ResponseError) and str(answer).startswith("NOGROUP"):
        return
    if isinstance(answer, Exception):
        raise answer


def _counted(counters: Mapping[bytes, bytes], kind: type[JobStatus | StreamReport]) -> dict[str, Any]:
    """The fields of the record that are counters of the whole job."""
    counts = {name.decode(): int(number) for name, number in sorted(counters.items())}
    rejected = {name.removeprefix(REJECTED): n for name, n in counts.items() if name.startswith(REJECTED)}
    fields = {field: counts.get(name, 0) for field, name in COUNTERS.items() if field in kind.__struct_fields__}
    return {**fields, "batches_rejected": rejected}


def _score(data: bytes | None) -> EvaluationScore | None:
    return decode(data, EvaluationScore) if data else None


def _seconds(clock: tuple[int, int]) -> float:
    return clock[0] + clock[1] / 1e6
