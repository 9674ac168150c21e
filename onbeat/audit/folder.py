"""A run folder, checked against an audit chain: of its stack, or of the file that a run leaves when that is gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.answers import AuditVerdict
from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk

FILE_NAME = "audit.json"


class AuditTask(Record, frozen=True, kw_only=True):
    """What a stack knows of a run, for a process that checks its folder."""

    spec: JobSpec
    is_complete: bool
    """The job succeeded, so that nothing may be missing at the end."""
    entries: tuple[AuditEntry, ...]


class AuditFile(Record, frozen=True, kw_only=True):
    status: JobStatus
    entries: tuple[AuditEntry, ...]


def write_audit(folder: RunFolder, status: JobStatus, entries: list[AuditEntry]) -> Path:
    path = folder.path / FILE_NAME
    path.write_bytes(encode_json(AuditFile(status=status, entries=tuple(entries))))
    return path


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


def read_audit_file(path: Path) -> AuditFile:
    """Raises NotFound for one that isn't there or can't be read, InvalidInput for a damaged one."""
    try:
        return decode_json(read_plain(path), AuditFile)
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", field=str(path)) from error


def read_spec(folder: RunFolder) -> JobSpec:
    """The spec as submitted: it says which batches an iteration must have."""
    try:
        return decode_json(read_plain(folder.spec), JobSpec)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and folder.path.is_dir():
            raise NotFound(
                f"{folder.job_id} ended before it wrote its spec, or has yet to begin, so nothing was trained",
                field="job",
                cure="`onbeat jobs` shows its state, and `onbeat watch` the reason",
            ) from error
        raise NotFound(
            f"the run folder {folder.path} cannot be read", field="--run-dir", cure="give the stack's run folder"
        ) from error
    except InvalidInput as error:
        raise InvalidInput(f"{folder.spec} is damaged: {error}", field="spec") from error


def verdict_of(folder: RunFolder, task: AuditTask) -> AuditVerdict:
    """Raises Conflict for a job without a record, NotFound where its folder isn't here, ContractViolation for a damaged
    file."""
    if not task.entries:
        raise Conflict("nothing was committed yet, so there is nothing to verify", field="state")
    if not folder.path.is_dir():
        raise NotFound(
            f"its run folder isn't below {folder.run_root} here, so its weights can't be hashed again",
            field="job_id",
            cure="verify it where the folder is: `onbeat verify JOB --run-dir DIR`",
        )
    return _checked(folder, task.entries, task.spec, complete=task.is_complete, notes=_notes(folder))


def _notes(folder: RunFolder) -> tuple[str, ...]:
    if folder.weight_root == folder.run_root or folder.weights.is_dir():
        return ()
    # A weight root in memory, or of another host; and a job that has ended keeps nothing there.
    return (f"no published versions are below the weight root {folder.weight_root} here, only checkpoints",)


def verify_folder(folder: RunFolder, status: JobStatus, entries: list[AuditEntry]) -> AuditVerdict:
    """Checks the chain, and the weights that the folder still holds."""
    return _checked(folder, entries, read_spec(folder), complete=status.state is JobState.SUCCEEDED)


def _checked(folder: RunFolder, entries: Sequence[AuditEntry], spec: JobSpec, **told: Any) -> AuditVerdict:
    return verify_run(entries, spec, job_id=folder.job_id, digests_on_disk=digests_on_disk(folder), **told)
