"""What a consumer does for jobs that have ended: their files become what their removal, or their retention, says.

sweep() ─┬▶ ended jobs that are due ──▶ audit chain and status into the run folder; the gateway removes the keys
         ├▶ onbeat:removed ─┬─ removed: the run folder goes, and the job's folder of the weight root
         │                  └─ kept:    what was put aside gets its name
         └▶ run folders of forgotten jobs ──▶ reduced to their result, or noted for removal

A run folder is given what `onbeat verify`, `onbeat export` and `onbeat delete` go by before Redis forgets its job:

.audit.json    put aside; true as long as the job isn't resumed, and only the gateway's removal says that it was not
audit.json     the job's keys are gone

What retention still owes the folder of a forgotten job stands in itself:

files_days are over ─▶ checkpoints, recordings and older versions go; the last version's weights and the files stay
result_days are over ─▶ the whole folder goes

A folder goes under a hidden name first, so that no reader sees half of one, and a removal that was killed is found by
it; links are removed, never followed:

job-0123456789ab/  ─▶  .job-0123456789ab.removed/  ─▶  nothing

No folder without an audit chain of its own is touched: a server that lost its data has forgotten every job.
Each step is safe to repeat, by any number of consumers, and goes on where a killed one stopped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.monitor import job_status
from contracts.encoding.names import MADE_HERE
from contracts.encoding.wire import encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound, OnbeatError, Unavailable
from contracts.run_folder import Removal, RunFolder
from contracts.settings import StackSettings
from contracts.spec_tables.retention import DAY_S, kept_for
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import AuditFile, read_audit_file, read_spec
from onbeat.audit.weights import digest_of
from onbeat.http_service.own_metrics import UNCOUNTED, OwnMetrics
from onbeat.process.crash_points import reach
from onbeat.process.folders import sync, usable
from onbeat.run_files import RunFiles, run_files
from onbeat_extras.retention.due_jobs import DueJob, audit_links, due_jobs, is_put_aside
from onbeat_extras.retention.removals import Removals

LATE_S = 600.0
"""So long a removal is looked at again: a trainer that slept through it may still write a file, or a start make one."""

REMOVAL_S = 60.0
"""The longest that a look at copies elsewhere may take."""

log = logging.getLogger(__name__)

Step = tuple[str, Callable[[], None]]
"""A job's id, and what is to be done for it."""
SMALL_FOLDERS = ("tensorboard",)
"""Folders that are a part of the result."""


class Sweeper:
    """One consumer's; what takes long on a slow file system must not keep it from its trainer."""

    def __init__(self, broker: Broker, settings: StackSettings, metrics: OwnMetrics = UNCOUNTED) -> None:
        self._broker = broker
        self._settings = settings
        self._metrics = metrics
        self._removals = Removals(broker)
        self._roots = tuple({settings.run_root_path, settings.weight_root_path})
        self._left: dict[str, LeftFolder | None] = {}
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Sweeps in a thread of its own, unless one is at it. It ends with the process, wherever it is then."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self.sweep()
        except Unavailable as error:
            log.warning("cannot look at ended jobs now: %s", error)

    def sweep(self) -> None:
        """Sees to every job that has ended. Raises Unavailable."""
        for steps in (self._due, self._noted, self._left_behind):
            for job_id, step in steps():
                try:
                    step()
                except Unavailable:
                    raise
                except NotFound as error:  # it was deleted meanwhile
                    log.info("%s", error)
                except OnbeatError as error:
                    log.error("the files of %s stay for now: %s", job_id, error)

    def _due(self) -> Iterator[Step]:
        for due in due_jobs(self._broker, self._settings):
            yield due.job_id, functools.partial(self._put_aside, due)

    def _noted(self) -> Iterator[Step]:
        notes = self._removals.notes()
        self._metrics.set("unreadable_removals", len(notes.unreadable))
        for job_id, removal in notes.removals.items():
            yield job_id, functools.partial(self._see_to_note, job_id, removal)

    def _left_behind(self) -> Iterator[Step]:
        for job_id in self._forgotten():
            yield job_id, functools.partial(self._see_to_left, job_id)

    def _put_aside(self, due: DueJob) -> None:
        if put_aside(self._broker, self._folder_of(due.job_id), due):
            log.info("the audit chain of %s is in its run folder: Redis may forget the job", due.job_id)
        self._files_of(due.job_id).record(is_forgotten=False)

    def _see_to_note(self, job_id: str, removal: Removal) -> None:
        folder, files = self._folder_of(job_id), self._files_of(job_id)
        if removal.files == "removed" and JobStore(self._broker).forks_of(job_id):
            return  # it was submitted since: its files go once it has ended
        if removal.files == "kept":
            name_it(folder)
            files.record(is_forgotten=True)
        else:
            removed = [remove_tree(root / job_id) for root in self._roots]
            files.remove()
            if any(removed):
                log.info("the files of %s are removed", job_id)
        # Where hosts share no folder, another one may have to name it.
        is_done = removal.files == "kept" and (folder.audit.exists() or not self._settings.objects)
        if is_done or time.time() - removal.at_s >= LATE_S:
            self._removals.done(job_id)

    def _forgotten(self) -> list[str]:
        """Run folders of no job that Redis knows."""
        root = self._settings.run_root_path
        there = [path.name for path in root.iterdir() if MADE_HERE.fullmatch(path.name)] if root.is_dir() else []
        notes = self._removals.notes()
        known = {*JobStore(self._broker).job_ids(), *notes.removals, *notes.unreadable}
        return [job_id for job_id in there if job_id not in known]

    def _see_to_left(self, job_id: str) -> None:
        left = self._left[job_id] = self._left.get(job_id) or left_folder(self._folder_of(job_id), self._settings)
        now_s = time.time()
        # A fork that has not ended may begin with its checkpoint, again.
        if left is None or (left.is_due(now_s) and JobStore(self._broker).forks_of(job_id)):
            return
        if left.is_over(now_s):
            self._removals.note(job_id, Removal(files="removed", at_s=now_s))
            del self._left[job_id]
        elif removed := left.reduce(now_s, lambda paths: self._files_of(job_id).forget(paths)):
            log.info("%s is reduced to its result: %s are removed", job_id, ", ".join(path.name for path in removed))

    def _files_of(self, job_id: str) -> RunFiles:
        return run_files(self._settings, self._folder_of(job_id), deadline_s=REMOVAL_S)

    def _folder_of(self, job_id: str) -> RunFolder:
        settings = self._settings
        weight_root = settings.weight_root_path if settings.weight_root else None
        return RunFolder(settings.run_root_path, job_id, weight_root=weight_root)


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
    with usable(folder.audit_aside, to_be="written"), contextlib.suppress(FileNotFoundError):
        if not folder.spec.exists():
            _write(folder.spec, encode_json(spec))
        _write(folder.audit_aside, encode_json(AuditFile(status=status, entries=entries)))
    return True


def name_it(folder: RunFolder) -> None:
    """Gives what was put aside its name, once Redis has forgotten the job. Raises OnbeatError."""
    with (
        usable(folder.audit, to_be="written"),
        contextlib.suppress(FileNotFoundError),
    ):  # another consumer was faster, or no folder
        folder.audit_aside.rename(folder.audit)
        sync(folder.path)


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
    sync(path.parent)


class LeftFolder:
    """A run folder of a job that Redis has forgotten, read once: neither its end nor its spec changes any more."""

    def __init__(self, folder: RunFolder, settings: StackSettings) -> None:
        """Raises NotFound and InvalidInput for a folder that doesn't say what it was."""
        stored = read_audit_file(folder.audit)
        ages = kept_for(read_spec(folder).retention, settings)
        ended_s = stored.status.ended_s or math.inf
        self._folder = folder
        self._result = (stored.status.policy_version, stored.status.weights_digest)
        self._is_reduced = False
        self._files_until_s = ended_s + DAY_S * ages.files_days
        self._result_until_s = ended_s + DAY_S * ages.result_days

    def is_over(self, now_s: float) -> bool:
        """Whether nothing of it is kept any longer."""
        return now_s >= self._result_until_s

    def is_due(self, now_s: float) -> bool:
        """Whether something of it is to go."""
        return self.is_over(now_s) or (now_s >= self._files_until_s and not self._is_reduced)

    def reduce(self, now_s: float, forget: Callable[[list[Path]], None] = lambda _: None) -> list[Path]:
        """Removes what the result doesn't need, once its time has come; what was removed. Raises OnbeatError.

        forget: removes copies of what is to go.
        """
        if not self.is_due(now_s):
            return []
        removed = []
        forget(going := needless(self._folder, *self._result))
        for path in going:
            if remove_tree(path):
                removed.append(path)
            reach("consumer.reducing_files")
        self._is_reduced = True
        return removed


def left_folder(folder: RunFolder, settings: StackSettings) -> LeftFolder | None:
    """None for a folder that has no audit chain of its own, or can't be read."""
    try:
        return LeftFolder(folder, settings)
    except (NotFound, InvalidInput):
        return None


def needless(folder: RunFolder, policy_version: int, weights_digest: str) -> list[Path]:
    """What the trained weights, and a look at the run, don't need. policy_version: the last one, with its digest.

    A whole version whose bytes have that digest stays alone. Where there is none (a delta, adapters, no published
    version at all, damage) versions stay as they are, and so does the model in the last checkpoint; where there is
    neither that, all checkpoints stay.
    """
    known = {folder.weights.name, folder.checkpoints.name, *SMALL_FOLDERS}
    found = [path for path in _folders(folder.path) if path.name not in known]
    last, checkpoint = folder.weights_of(policy_version), folder.checkpoint_after(policy_version - 1)
    if _holds(last, weights_digest):
        found += [folder.checkpoints, *(path for path in _folders(folder.weights) if path.name != last.name)]
    elif (checkpoint / "state.json").is_file():
        found += [path for path in _folders(folder.checkpoints) if path != checkpoint]
        found += sorted(checkpoint.glob("optimizer*.safetensors"))
    return found


def _holds(version: Path, weights_digest: str) -> bool:
    """Whether a folder holds a whole version, hashed again: nothing else is removed for the sake of a damaged one."""
    files = sorted(version.glob("*.safetensors"))
    try:
        return bool(files) and digest_of(files) == weights_digest
    except ContractViolation:
        return False


def _folders(parent: Path) -> list[Path]:
    """Real ones alone: a link leads to what isn't the job's."""
    if not parent.is_dir():
        return []
    with os.scandir(parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


def hidden_name(path: Path) -> Path:
    """Where a folder goes that is being removed."""
    return path.with_name(f".{path.name}.removed")


def remove_tree(path: Path) -> bool:
    """Removes a folder, a file or a link, and what an earlier removal left of it; whether there was anything.

    Raises OnbeatError that names the path where the system refuses: a part of it may be gone then, under its hidden
    name, and another call goes on with the rest.
    """
    hidden, found = hidden_name(path), False
    try:
        # Links and a half-removed folder are something, too.
        while os.path.lexists(path) or os.path.lexists(hidden):
            found = True
            _remove(hidden)
            with contextlib.suppress(FileNotFoundError):  # another consumer was faster
                path.rename(hidden)
                reach("consumer.removing_files")
                _remove(hidden)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OnbeatError(f"cannot be removed: {reason}", field=str(path), cure="remove it by hand") from error
    return found


def _remove(path: Path) -> None:
    """What is not there already. `rmtree` opens each folder as one and no link (Python's own answer to races)."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
