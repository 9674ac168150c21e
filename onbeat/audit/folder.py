"""A run folder, checked against an audit chain: of its stack, or of the file that a run leaves when that is gone."""

from __future__ import annotations

from pathlib import Path

from contracts.answers import AuditVerdict
from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput, NotFound
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.audit.weights import digests_on_disk

FILE_NAME = "audit.json"


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


def verify_folder(folder: RunFolder, status: JobStatus, entries: list[AuditEntry]) -> AuditVerdict:
    """Checks the chain, and the weights that the folder still holds."""
    return verify_run(
        entries,
        read_spec(folder),
        complete=status.state is JobState.SUCCEEDED,
        digests_on_disk=digests_on_disk(folder),
        job_id=folder.job_id,
    )
