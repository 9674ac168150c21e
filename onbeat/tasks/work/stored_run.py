"""Reads a run for a task: its folder, its spec and its audit chain, from Redis, or from the run folder of a job that
Redis doesn't know, as a private stack leaves one."""

from __future__ import annotations

from dataclasses import dataclass

from broker.connection.client import Broker
from broker.job_store import JobStore
from contracts.errors import NotFound
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.run_folder.run_files import bring_files


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The record of a run as its stack has it."""

    folder: RunFolder
    spec: JobSpec
    entries: tuple[AuditEntry, ...]
    """The audit chain, oldest first; () of a job that has committed nothing."""
    is_complete: bool
    """True where the job succeeded, so that nothing may be missing at the end."""


def read_run(broker: Broker, settings: StackSettings, job_id: str) -> StoredRun:
    """Reads a run, and brings its folder here where hosts share none.

    Raises:
        NotFound: Redis doesn't know the job, and no run folder here holds its audit chain.
        Unavailable: Redis or the object store doesn't answer.
    """
    weight_root = settings.weight_root_path if settings.weight_root else None
    folder = RunFolder(settings.run_root_path, job_id, weight_root=weight_root)
    jobs = JobStore(broker)
    try:
        # The state comes first: a job that is done by then has its whole chain.
        state = jobs.state(job_id)
        spec = jobs.spec(job_id)
        records = jobs.audit(job_id)
        listed = jobs.files(job_id)
    except NotFound:
        return _left_run(folder)
    bring_files(settings, folder, listed=listed)
    return StoredRun(
        folder=folder,
        spec=spec,
        entries=tuple(AuditEntry(record=record, digest=record_digest(record)) for record in records),
        is_complete=state is JobState.SUCCEEDED,
    )


def _left_run(folder: RunFolder) -> StoredRun:
    """Reads the run from the audit chain in its folder. Raises NotFound where there is none."""
    try:
        stored = read_audit_file(folder.audit)
    except NotFound as error:
        raise NotFound(
            f"Redis doesn't know the job, and its audit chain isn't in {folder.path} here",
            field="job_id",
            cure="`onbeat jobs` lists jobs; the run folder of another one must be below this worker's run root",
        ) from error
    return StoredRun(
        folder=folder,
        spec=read_spec(folder),
        entries=stored.entries,
        is_complete=stored.status.state is JobState.SUCCEEDED,
    )
