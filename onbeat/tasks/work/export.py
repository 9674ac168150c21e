"""The task `export`: a version of a job becomes a Hugging Face folder below the run root, for clients to fetch."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import time
from pathlib import Path

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.errors import NotFound, OnbeatError
from contracts.events import versions_of
from contracts.settings import StackSettings
from contracts.tasks.records import ExportedFiles, TaskResult
from onbeat.base.process.folders import make_missing, sync, usable
from onbeat.export.export import export as export_from
from onbeat.export.exported import Exported
from onbeat.tasks.attempt import Progress
from onbeat.tasks.exports import KEEP_S, name_of, place_of
from onbeat.tasks.work.stored_run import StoredRun, read_run

ATTEMPT = re.compile(r"\.?attempt-([0-9]{1,18})(?:\.[0-9a-f]{12})?")
"""Names of the folders that attempts write, by their turns."""


def export(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Writes the version that is asked for, verified against the job's audit chain.

    Raises:
        NotFound: The job, the version, the run folder or the model isn't there.
        ContractViolation: The version is damaged.
        OnbeatError: The disk has no room, or refuses.
    """
    run = read_run(broker, settings, attempt.arguments.job_id)
    if not run.folder.path.is_dir():
        raise NotFound(
            f"its run folder isn't below {run.folder.run_root} here",
            field="job_id",
            cure="start a worker of the queue files where the folder is",
        )
    place = place_of(settings, attempt.task_id)
    with usable(place, to_be="written"):
        make_missing(place)
    _remove_older(place, attempt.turn)
    written = place / f"attempt-{attempt.turn}"
    try:
        exported = _export(run, settings, attempt, written, progress)
        folder = place / name_of(exported.policy_version, exported.weights_digest)
        _put_in_place(written, folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
        with contextlib.suppress(OSError):  # another attempt writes there, or the export is in it
            place.rmdir()
    return TaskResult(exported=_files_of(exported, folder))


def _export(run: StoredRun, settings: StackSettings, attempt: Attempt, target: Path, progress: Progress) -> Exported:
    arguments = attempt.arguments
    return export_from(
        run.folder,
        run.spec,
        target,
        model_folder=settings.spec_root.find(run.spec.model.path, field="model.path"),
        versions=versions_of([entry.record for entry in run.entries]),
        version=arguments.version,
        best=arguments.best,
        adapters=arguments.adapters,
        progress=progress,
    )


def _remove_older(place: Path, turn: int) -> None:
    """Removes what earlier attempts left. One that still writes there was taken for dead: its end changes nothing."""
    for path in place.iterdir():
        older = ATTEMPT.fullmatch(path.name)
        if older and int(older[1]) < turn:
            shutil.rmtree(path, ignore_errors=True)


def _put_in_place(written: Path, folder: Path) -> None:
    """Gives the export its name; where another attempt has, its files are these."""
    with usable(folder, to_be="written"):
        try:
            written.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)


def _files_of(exported: Exported, folder: Path) -> ExportedFiles:
    files = {name: _size_of(folder / name) for name in exported.files}
    return ExportedFiles(
        policy_version=exported.policy_version,
        weights_digest=exported.weights_digest,
        files_digest=exported.files_digest,
        adapters_digest=exported.adapters_digest,
        source=exported.source,
        base=exported.base,
        files=files,
        num_bytes=sum(files.values()),
        until_s=time.time() + KEEP_S,
        host=socket.gethostname(),
    )


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise OnbeatError(f"cannot be read: {error.strerror}", field=str(path), cure="export again") from error
