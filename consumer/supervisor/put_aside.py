"""What a run folder is given before Redis forgets its job: the audit chain and the last status, under a hidden name.

.audit.json    put aside; true as long as the job isn't resumed, and only the gateway's removal says that it was not
audit.json     the job's keys are gone: `onbeat verify`, `onbeat export` and `onbeat delete` go by it
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.retention import DueJob, audit_links, is_all_of
from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput, NotFound, OnbeatError
from contracts.run_folder import RunFolder
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import AuditFile, read_audit_file
from onbeat.process.crash_points import reach


def put_aside(broker: Broker, folder: RunFolder, due: DueJob) -> bool:
    """Writes chain and status into the run folder, unless they are there; whether it wrote them.

    A job that never had a folder gets none: nothing of it was trained. Raises OnbeatError where it cannot be written.
    """
    if not folder.path.is_dir() or is_put_aside(broker, folder, due):
        return False
    entries = tuple(AuditEntry(record=record, digest=digest) for record, digest in audit_links(broker, due.job_id))
    status = job_status(broker, due.job_id, generators=())
    spec = JobStore(broker).spec(due.job_id)
    # Another consumer was faster, or the folder is gone: the next sweep sees.
    with _errors(folder.audit_aside), contextlib.suppress(FileNotFoundError):
        if not folder.spec.exists():
            _write(folder.spec, encode_json(spec))
        _write(folder.audit_aside, encode_json(AuditFile(status=status, entries=entries)))
    return True


def is_put_aside(broker: Broker, folder: RunFolder, due: DueJob) -> bool:
    """Whether the run folder holds the chain and the status of the job as it was seen."""
    try:
        stored = read_audit_file(folder.audit_aside)
    except (NotFound, InvalidInput):
        return False
    return is_all_of(broker, due, stored.status, [(one.record, one.digest) for one in stored.entries])


def name_it(folder: RunFolder) -> None:
    """Gives what was put aside its name, once Redis has forgotten the job. Raises OnbeatError."""
    with _errors(folder.audit), contextlib.suppress(FileNotFoundError):  # another consumer was faster, or no folder
        folder.audit_aside.rename(folder.audit)
        _sync(folder.path)


def _write(path: Path, data: bytes) -> None:
    """On disk, and whole, before it has its name."""
    scratch = path.with_name(f"{path.name}.new")
    scratch.unlink(missing_ok=True)  # of one that was killed; a pipe of that name would hold this process for ever
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    reach("consumer.putting_aside")
    scratch.rename(path)
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OnbeatError(f"cannot be written: {error.strerror}", field=str(path), cure="make room there") from error
