"""Tells a fresh Redis of a run what its folder says, by the same functions as its gateway and its trainer told it once.

spec.json ─▶ created ─▶ chain.jsonl ─▶ its commits ─▶ evaluations.jsonl ─▶ its scores ─▶ how it ended
"""

from __future__ import annotations

import contextlib

from broker.connection.client import Broker
from broker.job_store import NO_LIMITS, JobStore
from broker.trainer_side import TrainerSide
from contracts.encoding.json_lines import MAX_PLAIN_BYTES, json_lines, read_json_lines
from contracts.encoding.wire import encode
from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.events import AuditRecord, EvaluationFinished, StateChanged, TrainerStarted
from contracts.jobs import EvaluationScore, JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.loop import chain_file
from onbeat.loop.health.watch import HealthWatch

UNKNOWN_END = "as its run folder has it: how it ended is not written there"
LEASE_S = 3600.0


def tell(broker: Broker, folder: RunFolder) -> None:
    """Raises NotFound and InvalidInput for a folder that is none of a run, or is damaged."""
    spec, status = read_spec(folder), _status(folder)
    records = read_json_lines(
        folder.chain, AuditRecord, max_bytes=MAX_PLAIN_BYTES, max_line_bytes=chain_file.MAX_LINE_BYTES
    )
    created_s = status.created_s if status else folder.spec.stat().st_mtime
    job_id, jobs = folder.job_id, JobStore(broker)
    event = encode(StateChanged(at_s=created_s, state=JobState.QUEUED))
    broker.run(
        "create_job",
        encode(spec),
        event,
        job=job_id,
        state=JobState.QUEUED.value,
        created_s=created_s,
        owner="",
        idempotency_key="",
        **NO_LIMITS,
    )
    side = TrainerSide(broker, job_id, owner="view", lease_s=LEASE_S, num_open=spec.num_open, plan=spec.stage_plan)
    epoch = side.acquire()
    jobs.move(job_id, JobState.RUNNING, trainer_epoch=epoch)
    if records:
        jobs.tell(job_id, TrainerStarted(at_s=created_s, trainer_epoch=epoch, next_iteration=0, resumed=False))
        side.restore(records)
    for _, score in json_lines(folder.evaluations, EvaluationScore):
        jobs.record_evaluation(job_id, score)
        jobs.tell(job_id, EvaluationFinished(at_s=created_s, score=score))
    with contextlib.suppress(InvalidInput):  # rules that end a job end nothing here
        HealthWatch(jobs, folder, spec).begin(spec.iterations)
    state, reason, ended_s = _end(spec, status, records, folder)
    if state is JobState.CANCELLED:
        with contextlib.suppress(Conflict):
            jobs.move(job_id, JobState.CANCELLING)
    jobs.move(job_id, state, reason=reason, trainer_epoch=epoch)
    broker.write("HSET", "job", "started_s", str(status.started_s if status else created_s), job=job_id)
    broker.write("HSET", "job", "ended_s", str(ended_s), job=job_id)
    side.release()


def _status(folder: RunFolder) -> JobStatus | None:
    """What its stack said of it last, where that is written down."""
    for path in (folder.audit, folder.audit_aside):
        with contextlib.suppress(NotFound):
            return read_audit_file(path).status
    return None


def _end(
    spec: JobSpec, status: JobStatus | None, records: list[AuditRecord], folder: RunFolder
) -> tuple[JobState, str, float]:
    """(state, reason, Unix time)."""
    if status is not None and status.state.is_final:
        return status.state, status.reason, status.ended_s
    last_s = max((path.stat().st_mtime for path in folder.path.glob("*.jsonl")), default=folder.spec.stat().st_mtime)
    is_whole = any(record.iteration >= spec.last_iteration for record in records)
    return (JobState.SUCCEEDED, "", last_s) if is_whole else (JobState.CANCELLED, UNKNOWN_END, last_s)
