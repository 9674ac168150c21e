"""What a job looks like from outside: its status, and one moment of its streams. Nothing here writes to a job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, ParamSpec, TypeVar

from broker.connection.client import Broker
from broker.fence import FenceState, read_fence
from broker.hosts_side import hosts_waited_for
from broker.job_store import health_of, unknown_job
from broker.keys import JOBS, STAGE_BAND, TRAINER_GROUP, OpenKeys, SlotKeys, item_fields, num_open_of
from broker.ledger import BatchRecord, Expected, Published, read_of, readable
from broker.presence import ConsumerPresence, Presence, StagePresence, awaited_generator, missed_by_all
from broker.stage_monitor import last_claims, stage_view
from contracts.answers import StackState
from contracts.encoding.wire import decode
from contracts.errors import ContractViolation
from contracts.events import AuditRecord
from contracts.jobs import EvaluationScore, JobCounts, JobState, JobStatus
from contracts.monitor import GeneratorSeen, PromptLease, StreamReport, StreamState
from contracts.spec import JobSpec
from contracts.spec_tables.trainer import TrainerSpec
from onbeat.process.dependency import REWARD_SERVICE

P = ParamSpec("P")
T = TypeVar("T")
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
STARTED_WITHIN_S = 30.0
"""A queued job misses a generator once a consumer has lived for so long: one that starts beside it may take a while."""
MAX_LEASES = 1000
KEPT_STREAMS = ("dead", "audit", "events")
"""Streams of the job; those of the window are `rollouts`, one for each slot, with `prompts` beside them."""


def _readable(report: Callable[P, T]) -> Callable[P, T]:
    """A report on a job, that says so where what it reads is damaged."""

    @functools.wraps(report)
    def reads(*args: P.args, **kwargs: P.kwargs) -> T:
        with read_of(str(args[1])):
            return report(*args, **kwargs)

    return reads


@_readable
def job_status(broker: Broker, job_id: str, *, generators: Sequence[GeneratorSeen] | None = None) -> JobStatus:
    """Raises NotFound, and ContractViolation for a job of which something else stands there.

    generators: those that live, where a caller that asks for many jobs knows them already.
    """
    keys = broker.job_keys(job_id)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.hgetall(keys.job).get(keys.spec).hgetall(keys.counters)
        pipe.xrevrange(keys.audit, count=1).time().info("memory")
        job, spec, counters, last_audit, clock, memory = pipe.execute()
    if b"state" not in job or spec is None:
        raise unknown_job(job_id)
    if generators is None:
        generators = Presence(broker).live()
    spec = decode(spec, JobSpec)
    values = {name.decode(): value for name, value in job.items()}
    fence = read_fence(broker, keys)
    state = JobState(values["state"].decode())
    is_full = 0 < memory["maxmemory"] <= _counted_bytes(memory)  # it refuses writes that need memory
    reason = values["reason"].decode() or _waits_for(
        broker, job_id, spec, fence, state=state, live=generators, now_s=_seconds(clock), is_full=is_full
    )
    return JobStatus(
        job_id=job_id,
        name=spec.name,
        tags=spec.tags,
        state=state,
        reason=reason,
        schedule=spec.schedule,
        max_policy_lag=spec.max_policy_lag,
        iterations=spec.iterations,
        # The last opened iteration may only evaluate: it trains nothing.
        iterations_committed=min(fence.committed + 1, spec.iterations),
        created_s=float(values["created_s"]),
        started_s=float(values.get("started_s", 0.0)),
        ended_s=float(values.get("ended_s", 0.0)),
        run_directory=job_id,
        live_generators=len(generators),
        evaluation_before=_score(values.get("evaluation_before")),
        evaluation_latest=_score(values.get("evaluation_latest")),
        health=health_of(values),
        **_counted(JobStatus, fence, last_audit, counters),
    )


@_readable
def stream_report(broker: Broker, job_id: str) -> StreamReport:
    """The job's streams at one moment. Raises NotFound."""
    with broker.call():
        spec: Any = broker.redis.get(OpenKeys(job_id).spec)
    keys = broker.job_keys(job_id, num_open_of(spec) if spec else 1)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.hexists(keys.job, "state").hgetall(keys.counters).xrevrange(keys.audit, count=1).time()
        for name in KEPT_STREAMS:
            pipe.xlen(getattr(keys, name)).memory_usage(getattr(keys, name))
        for slot in keys.slots:
            _ask_slot(pipe, slot)
        answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        # A stream that was never opened has no group: that is a count of 0, not an error.
        if isinstance(answer, Exception) and not str(answer).startswith("NOGROUP"):
            raise answer
    exists, counters, last_audit, clock, *rest = answers
    if not exists:
        raise unknown_job(job_id)
    sizes, of_slots = rest[: 2 * len(KEPT_STREAMS)], rest[2 * len(KEPT_STREAMS) :]
    now_s, fence = _seconds(clock), read_fence(broker, keys)
    slots = [_slot_state(of_slots[at : at + SLOT_ANSWERS], now_s) for at in range(0, len(of_slots), SLOT_ANSWERS)]
    states = (
        StreamState(name=name, num_entries=num_entries, num_pending=0, num_waiting=0, memory_bytes=memory_bytes or 0)
        for name, num_entries, memory_bytes in zip(KEPT_STREAMS, sizes[0::2], sizes[1::2], strict=True)
    )
    in_order = [opened.iteration % len(slots) for opened in fence.window]
    leases = (lease for at in in_order for lease in _leases(broker, keys.slots[at], slots[at].leases, now_s))
    staged = _stages(broker, job_id, spec)
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
        **_counted(StreamReport, fence, last_audit, counters),
        **staged,
    )


def _stages(broker: Broker, job_id: str, packed: bytes | None) -> dict[str, Any]:
    """The fields of a report on a job with stages; {} of any other."""
    with contextlib.suppress(ContractViolation):  # of an older version: a report shows what it can
        spec = decode(packed, JobSpec) if packed else None
        if spec is not None and spec.stages:
            return stage_view(broker, job_id, spec)._asdict()
    return {}


SLOT_ANSWERS = 8
"""What `_ask_slot` asks for."""


def _ask_slot(pipe: Any, slot: SlotKeys) -> None:
    leased = (slot.work, 1, f"({STAGE_BAND}")
    pipe.hgetall(slot.ledger).zrange(*leased, byscore=True, offset=0, num=MAX_LEASES, withscores=True)
    pipe.hlen(slot.prompts).memory_usage(slot.prompts).zcount(*leased)
    pipe.xlen(slot.rollouts).memory_usage(slot.rollouts).xpending(slot.rollouts, TRAINER_GROUP)


class _Slot(NamedTuple):
    """One open iteration's batches and leases."""

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


def _newest_version(fence: FenceState, last_audit: list[Any]) -> tuple[int, str]:
    """The newest version that a commit made: of the window, or where nothing is open, of the newest audit record."""
    if fence.versions or not last_audit:
        return fence.policy_version, fence.weights_digest
    last = decode(last_audit[0][1][b"record"], AuditRecord)
    if last.next_weights_digest:
        return last.policy_version + 1, last.next_weights_digest
    return last.policy_version, last.weights_digest


def _generators_waited_for(job_id: str, spec: JobSpec, fence: FenceState, live: Sequence[GeneratorSeen]) -> str:
    """What keeps all generators from the job's batches; "" where one may be at work on them."""
    if not live:
        return "a generator, and none lives: start one with `onbeat up` or `python -m producer`"
    able = [generator for generator in live if generator.serves(job_id, deterministic=spec.deterministic)]
    if not able:
        return awaited_generator(live, job_id, lambda: fence.engine)
    return missed_by_all(able, (REWARD_SERVICE,))


def _trainer_waited_for(broker: Broker, job_id: str, spec: TrainerSpec, now_s: float) -> str:
    if spec.over_hosts is not None:
        return hosts_waited_for(broker, job_id, least=spec.over_hosts.least, now_s=now_s)
    return "an external trainer" if spec.external else "a trainer"


def _waits_for(
    broker: Broker,
    job_id: str,
    spec: JobSpec,
    fence: FenceState,
    *,
    state: JobState,
    live: Sequence[GeneratorSeen],
    now_s: float,
    is_full: bool,
) -> str:
    """What is in the way of a job that is queued, or runs; "" where nothing is. live: the generators."""
    if state is JobState.QUEUED:
        trainer = _trainer_waited_for(broker, job_id, spec.trainer, now_s)
        consumers = [] if live or spec.trainer.external else ConsumerPresence(broker).live()
        if any(consumer.lives_s >= STARTED_WITHIN_S for consumer in consumers):
            return f"waits for {trainer}; and for {_generators_waited_for(job_id, spec, fence, live)}"
        return f"waits for {trainer}"
    if state is not JobState.RUNNING:
        return ""
    if is_full:
        return "waits for room in Redis, which is at maxmemory: raise it, or end jobs"
    if fence.lease_until_s <= now_s:
        return f"waits for {_trainer_waited_for(broker, job_id, spec.trainer, now_s)} to take over"
    if fence.state != "open":
        return ""
    stages = StagePresence(broker)
    of_stages = stages.missed(job_id, spec.stages) | stages.unserved(job_id, spec.stages)
    awaited = (_generators_waited_for(job_id, spec, fence, live), *of_stages.values())
    return next((f"waits for {what}" for what in awaited if what), "")


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


def stack_state(broker: Broker, *, max_jobs: int) -> StackState:
    """What all jobs share. max_jobs: how many the gateway keeps."""
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        memory, num_jobs = pipe.info("memory").zcard(JOBS).execute()
    return StackState(
        redis_used_bytes=_counted_bytes(memory),
        redis_max_bytes=memory["maxmemory"],
        live_generators=len(Presence(broker).live()),
        live_stage_workers=len(StagePresence(broker).live()),
        live_consumers=len(ConsumerPresence(broker).live()),
        num_jobs=num_jobs,
        max_jobs=max_jobs,
    )


def _counted_bytes(memory: Mapping[str, int]) -> int:
    """Memory without buffers of replicas and of the file, which the server doesn't count against its limit."""
    return memory["used_memory"] - memory.get("mem_not_counted_for_evict", 0)


def _counted(
    kind: type[JobCounts], fence: FenceState, last_audit: list[Any], counters: Mapping[bytes, bytes]
) -> dict[str, Any]:
    """The fields of a status or a report that say how far the job is, and its counters."""
    version, digest = _newest_version(fence, last_audit)
    counts = {name.decode(errors="replace"): int(number) for name, number in sorted(counters.items())}
    rejected = {name.removeprefix(REJECTED): n for name, n in counts.items() if name.startswith(REJECTED)}
    fields = {field: counts.get(name, 0) for field, name in COUNTERS.items() if field in kind.__struct_fields__}
    return {
        "window": fence.window,
        "policy_version": version,
        "weights_digest": digest,
        "trainer_epoch": fence.trainer_epoch,
        "batches_expected": fence.expected,
        "batches_published": fence.published,
        "batches_rejected": rejected,
        **fields,
    }


def _score(data: bytes | None) -> EvaluationScore | None:
    return decode(data, EvaluationScore) if data else None


def _seconds(clock: tuple[int, int]) -> float:
    return clock[0] + clock[1] / 1e6
