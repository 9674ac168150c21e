"""Describes a job, and the stack, from outside. Nothing here writes to a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from broker.awaited_batch import awaited_batch
from broker.connection.client import Broker
from broker.fence import FenceState, read_fence
from broker.hosts_side import hosts_waited_for
from broker.job_store import health_of, unknown_job
from broker.keys import JOBS, JobKeys
from broker.ledger import read_of
from broker.presence import (
    ConsumerPresence,
    Presence,
    StagePresence,
    TaskPresence,
    awaited_generator,
    missed_by_all,
    tried_again,
)
from contracts.answers import StackState
from contracts.encoding.wire import decode
from contracts.errors import Fault
from contracts.events import AuditRecord
from contracts.jobs import EvaluationScore, JobCounts, JobState, JobStatus
from contracts.monitor import GeneratorSeen
from contracts.spec.job import JobSpec
from contracts.spec.trainer import TrainerSpec
from onbeat.base.process.dependency import REWARD_SERVICE

REJECTED = "rejected:"
COUNTERS = {
    "batches_accepted": "accepted",
    "accepted_bytes": "accepted_bytes",
    "batches_reclaimed": "reclaimed",
    "leases_lost": "lost",
    "batches_hedged": "hedged",
    "hedges_won": "hedges_won",
    "batches_failed": "failed",
    "batches_dead": "dead",
    "batches_redispatched": "redispatched",
    "rewinds": "rewinds",
    "versions_proved": "proved",
    "proofs_far": "proof_far",
    "proofs_stale": "proof_stale",
    "proofs_not_finite": "proof_not_finite",
    "proofs_untold": "proof_cant_tell",
}
"""Field of a status or a report → its counter."""
STARTED_WITHIN_S = 30.0
"""A queued job misses a generator once a consumer has lived for so long: one that starts beside it may take a while."""


def job_status(broker: Broker, job_id: str, *, generators: Sequence[GeneratorSeen] | None = None) -> JobStatus:
    """Reads how a job stands.

    Args:
        broker: The broker.
        job_id: The job.
        generators: The live generators, where a caller that asks for many jobs knows them already; None reads them.

    Raises:
        NotFound: There is no such job.
        ContractViolation: Redis holds something of it that can't be understood.
    """
    keys = broker.job_keys(job_id)
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        pipe.hgetall(keys.job).get(keys.spec).hgetall(keys.counters)
        pipe.xrevrange(keys.audit, count=1).time().info("memory")
        ask_missing(pipe, keys)
        job, spec, counters, last_audit, clock, memory, missing = pipe.execute()
    if b"state" not in job or spec is None:
        raise unknown_job(job_id)
    if generators is None:
        generators = Presence(broker).live()
    with read_of(job_id):
        spec = decode(spec, JobSpec)
        values = {name.decode(): value for name, value in job.items()}
        fence = read_fence(broker, keys)
        state = JobState(values["state"].decode())
        is_full = 0 < memory["maxmemory"] <= _counted_bytes(memory)  # it refuses writes that need memory
        reason = values["reason"].decode() or _waits_for(
            broker,
            job_id,
            spec,
            fence,
            state=state,
            live=generators,
            now_s=seconds(clock),
            is_full=is_full,
            trainer_fault=values.get("trainer_fault", b"").decode(errors="replace"),
        )
        fault = UNSET
        if values.get("fault"):
            fault = Fault(values["fault"].decode())
        return JobStatus(
            job_id=job_id,
            name=spec.name,
            tags=spec.tags,
            state=state,
            reason=reason,
            schedule=spec.schedule,
            max_policy_lag=spec.max_policy_lag,
            iterations=spec.iterations,
            iterations_committed=_num_trained(fence, last_audit, spec),
            owner=values.get("owner", b"").decode(),
            learns_given=spec.algorithm.learns_given,
            fault=fault,
            created_s=float(values["created_s"]),
            started_s=float(values.get("started_s", 0.0)),
            ended_s=float(values.get("ended_s", 0.0)),
            run_directory=job_id,
            live_generators=len(generators),
            evaluation_before=_score(values.get("evaluation_before")),
            evaluation_latest=_score(values.get("evaluation_latest")),
            health=health_of(values),
            health_past=health_of(values, "health_past"),
            **counted(JobStatus, fence, last_audit, with_lost(counters, missing, seconds(clock))),
        )


def _num_trained(fence: FenceState, last_audit: list[Any], spec: JobSpec) -> int:
    """Returns the number of iterations that were committed with a version that they made."""
    if last_audit:
        last = decode(last_audit[0][1][b"record"], AuditRecord)
        # `evaluation.stop_when` has ended the job in this iteration, which is committed and trained nothing.
        if last.stopped is not UNSET:
            return last.iteration
    # The last opened iteration may only evaluate: it trains nothing.
    return min(fence.committed + 1, spec.iterations)


def _newest_version(fence: FenceState, last_audit: list[Any]) -> tuple[int, str]:
    """Returns the newest version that a commit made, and its digest.

    It is the window's, or where nothing is open, the newest audit record's.
    """
    if fence.versions or not last_audit:
        return fence.policy_version, fence.weights_digest
    last = decode(last_audit[0][1][b"record"], AuditRecord)
    if last.next_weights_digest:
        return last.policy_version + 1, last.next_weights_digest
    return last.policy_version, last.weights_digest


def _generators_waited_for(job_id: str, spec: JobSpec, fence: FenceState, live: Sequence[GeneratorSeen]) -> str:
    """Says what keeps all generators from the job's batches, or one of them for seconds; "" where all may work."""
    if not live:
        return "a generator, but none is running: start one with `onbeat up` or `python -m producer`"
    able = [generator for generator in live if generator.serves(job_id, deterministic=spec.deterministic)]
    if not able:
        return awaited_generator(live, job_id, lambda: fence.engine)
    return missed_by_all(able, (REWARD_SERVICE,)) or tried_again(able, job_id, (REWARD_SERVICE,))


def _trainer_waited_for(broker: Broker, job_id: str, spec: TrainerSpec, now_s: float) -> str:
    if spec.over_hosts is not None:
        return hosts_waited_for(broker, job_id, least=spec.over_hosts.least, now_s=now_s)
    return "an external trainer" if spec.external else "a trainer"


def _has_settled_consumer(broker: Broker) -> bool:
    return any(consumer.lives_s >= STARTED_WITHIN_S for consumer in ConsumerPresence(broker).live())


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
    trainer_fault: str,
) -> str:
    """Says what a job that is queued, or runs, waits for; "" where it waits for nothing.

    Args:
        broker: The broker.
        job_id: The job.
        spec: Its spec.
        fence: Its fence.
        state: Its state.
        live: The live generators.
        now_s: Unix time by the server's clock.
        is_full: The server is at maxmemory.
        trainer_fault: The line of foreign code by which the last trainer without progress ended; "" for none.
    """
    if state is JobState.QUEUED:
        trainer = _trainer_waited_for(broker, job_id, spec.trainer, now_s)
        misses_generator = not live and not spec.trainer.external
        if misses_generator and _has_settled_consumer(broker):
            return f"waits for {trainer}; and for {_generators_waited_for(job_id, spec, fence, live)}"
        return f"waits for {trainer}"
    if state is not JobState.RUNNING:
        return ""
    if is_full:
        return "waits for room in Redis, which is at maxmemory: raise it, or end jobs"
    if fence.lease_until_s <= now_s:
        waits = f"waits for {_trainer_waited_for(broker, job_id, spec.trainer, now_s)} to take over"
        return f"{waits}; the last one ended by {trainer_fault}" if trainer_fault else waits
    if fence.state != "open":
        return ""
    stages = StagePresence(broker)
    of_stages = stages.missed(job_id, spec.stages) | stages.unserved(job_id, spec.stages)
    keys = broker.job_keys(job_id, spec.num_open)
    awaited = (
        _generators_waited_for(job_id, spec, fence, live),
        *of_stages.values(),
        awaited_batch(broker, keys, fence, live=live, now_s=now_s),
    )
    return next((f"waits for {what}" for what in awaited if what), "")


def stack_state(broker: Broker, *, max_jobs: int) -> StackState:
    """Reads what all jobs share. max_jobs: how many the gateway keeps."""
    with broker.call():
        pipe: Any = broker.redis.pipeline(transaction=False)
        memory, num_jobs = pipe.info("memory").zcard(JOBS).execute()
    return StackState(
        redis_used_bytes=_counted_bytes(memory),
        redis_max_bytes=memory["maxmemory"],
        live_generators=len(Presence(broker).live()),
        live_stage_workers=len(StagePresence(broker).live()),
        live_consumers=len(ConsumerPresence(broker).live()),
        live_task_workers=len(TaskPresence(broker).live()),
        num_jobs=num_jobs,
        max_jobs=max_jobs,
    )


def _counted_bytes(memory: Mapping[str, int]) -> int:
    """Returns the used bytes without buffers of replicas and of the file, which don't count against the limit."""
    return memory["used_memory"] - memory.get("mem_not_counted_for_evict", 0)


MAX_MISSING = 1000
"""Most claims that one look reads; the scripts count them by and by."""


def ask_missing(pipe: Any, keys: JobKeys) -> None:
    """Asks for the claims whose holders were not heard of since their batches were settled by others, as (number, ms at
    which the lease ends), the oldest first."""
    pipe.zrange(keys.missing, 0, MAX_MISSING - 1, withscores=True)


def with_lost(
    counters: Mapping[bytes, bytes], missing: Sequence[tuple[bytes, float]], now_s: float
) -> dict[bytes, bytes]:
    """Returns the counters of a job with the leases that ended since: no script counts them before it notes another.

    missing: as `ask_missing` gets them. now_s: Unix time by the server's clock.
    """
    num_lost = int(counters.get(b"lost", 0)) + sum(ends_ms <= 1000 * now_s for _, ends_ms in missing)
    return {**counters, b"lost": str(num_lost).encode()}


def counted(
    kind: type[JobCounts], fence: FenceState, last_audit: list[Any], counters: Mapping[bytes, bytes]
) -> dict[str, Any]:
    """Returns the fields of a status or a report that say how far the job is, and its counters."""
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


def seconds(clock: tuple[int, int]) -> float:
    """Returns the server's TIME, (seconds, microseconds), as Unix time in seconds."""
    return clock[0] + clock[1] / 1e6
