"""The facts in a run folder: the spec, and the chain and status that are left there when the stack is gone."""

from __future__ import annotations

from pathlib import Path

from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import Record, decode_json
from contracts.errors import InvalidInput, NotFound
from contracts.jobs import JobStatus
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry

MAX_SPEC_BYTES = 16 * 1024 * 1024
"""The longest spec.json: a submission has 1 MiB at most, and 64 KiB for each file that it names."""


class AuditFile(Record, frozen=True, kw_only=True):
    status: JobStatus
    entries: tuple[AuditEntry, ...]


def read_audit_file(path: Path) -> AuditFile:
    """Raises NotFound for one that isn't there or can't be read, InvalidInput for a damaged one."""
    try:
        return decode_json(read_plain(path), AuditFile)
    except OSError as error:
        raise NotFound(f"cannot be read: {error.strerror}", field=str(path)) from error


def read_spec(folder: RunFolder) -> JobSpec:
    """Reads the spec as submitted, by which an iteration's batches are known."""
    try:
        return decode_json(read_plain(folder.spec, max_bytes=MAX_SPEC_BYTES), JobSpec)
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
