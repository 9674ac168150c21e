"""The audit chain that a run leaves in its folder for the time when its stack is gone: written, read, checked."""

from __future__ import annotations

import os
from pathlib import Path

from contracts.answers import AuditVerdict
from contracts.encoding.wire import encode_json
from contracts.errors import NotFound
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import settings_from
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.folder import AuditFile, read_audit_file, read_spec
from onbeat.audit.weights import digests_on_disk
from onbeat.client.gateway import GatewayClient
from onbeat.run_folder.run_files import bring_missing

VERIFY_WITHIN_S = 3600.0
"""The task has a limit of its own, ONBEAT_VERIFY_TIMEOUT_S."""


def write_audit(folder: RunFolder, status: JobStatus, entries: list[AuditEntry]) -> None:
    write_audit_at(folder.audit, status, entries)


def write_audit_at(path: Path, status: JobStatus, entries: list[AuditEntry]) -> None:
    path.write_bytes(encode_json(AuditFile(status=status, entries=tuple(entries))))


def read_audit(folder: RunFolder) -> tuple[JobStatus, list[AuditEntry]]:
    """Raises NotFound where the run left no audit file."""
    try:
        stored = read_audit_file(folder.audit)
    except NotFound as error:
        raise NotFound(
            f"no audit chain of {folder.job_id} in {folder.run_root}",
            field="job",
            cure="start the stack that holds it with `onbeat up`, or give --run-dir",
        ) from error
    return stored.status, list(stored.entries)


def stands_alone(folder: RunFolder, gateway: str | None, run_dir: Path | None) -> bool:
    """Returns True where a command goes by the run folder, which has its chain, and not by a gateway.

    A folder that a command names is brought from where copies of it are kept.
    """
    if gateway is None and run_dir is not None:
        bring_missing(settings_from(os.environ), folder)
    return gateway is None and folder.audit.exists()


def verify_folder(folder: RunFolder, status: JobStatus, entries: list[AuditEntry]) -> AuditVerdict:
    """Checks the chain, and the weights that the folder still holds."""
    return verify_run(
        entries,
        read_spec(folder),
        complete=status.state is JobState.SUCCEEDED,
        digests_on_disk=digests_on_disk(folder),
        job_id=folder.job_id,
    )


def verify_at(client: GatewayClient, folder: RunFolder) -> AuditVerdict:
    """Checks a gateway's job here, where its folder is, and else has a worker of tasks check what it sees."""
    if folder.path.is_dir():
        return verify_folder(folder, client.job(folder.job_id), client.audit(folder.job_id))
    return client.verify(folder.job_id, within_s=VERIFY_WITHIN_S)
