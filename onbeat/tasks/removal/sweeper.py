"""What the tasks `sweep` and `delete` do for jobs that have ended: their files become what their removal, or their
retention, says.

sweep() ─┬▶ ended jobs that are due ──▶ audit chain and status into the run folder; `forget` removes the keys
         ├▶ onbeat:removed ─┬─ removed: the run folder goes, and the job's folder of the weight root
         │                  └─ kept:    what was put aside gets its name
         └▶ run folders of forgotten jobs ──▶ reduced to their result, or noted for removal

A run folder is given what `onbeat verify`, `onbeat export` and `onbeat delete` go by before Redis forgets its job:

.audit.json    put aside; true as long as the job isn't resumed, and only the removal of its keys says that it was not
audit.json     the job's keys are gone

What retention still owes the folder of a forgotten job stands in itself (left_folders.py):

files_days are over ─▶ checkpoints, recordings and older versions go; the last version's weights and the files stay
result_days are over ─▶ the whole folder goes

A folder goes under a hidden name first, so that no reader sees half of one, and a removal that was killed is found by
it; links are removed, never followed:

job-0123456789ab/  ─▶  .job-0123456789ab.removed/  ─▶  nothing

No folder without an audit chain of its own is touched: a server that lost its data has forgotten every job.
Each step is safe to repeat, by any number of workers, and goes on where a killed one stopped. A step that runs again
late removes nothing of what came between: it goes by a note in Redis, whose job's id no other job ever has, and leaves
files alone of which Redis knows the job.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from broker import keys
from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.removals import Removals
from contracts.encoding.names import MADE_HERE
from contracts.encoding.wire import encode_json
from contracts.errors import NotFound, OnbeatError, Unavailable
from contracts.run_folder import Removal, RunFolder
from contracts.settings import StackSettings
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import AuditFile
from onbeat.base.process.crash_points import reach
from onbeat.base.process.folders import sync, usable
from onbeat.run_folder.run_files import RunFiles, run_files
from onbeat.tasks.removal.due_jobs import DueJob, audit_links, due_jobs, is_put_aside
from onbeat.tasks.removal.left_folders import LeftFolders
from onbeat.tasks.removal.trees import remove_tree

LATE_S = 600.0
"""So long a removal is looked at again: a trainer that slept through it may still write a file, or a start make one."""

REMOVAL_S = 60.0
"""The longest that a look at copies elsewhere may take."""

log = logging.getLogger(__name__)

Step = tuple[str, Callable[[], None]]
"""A job's id, and what is to be done for it."""


class Sweeper:
    """One look at the files of jobs that have ended, by a worker of the host that has them."""

    def __init__(self, broker: Broker, settings: StackSettings) -> None:
        self._broker = broker
        self._settings = settings
        self._removals = Removals(broker)
        self._roots = tuple({settings.run_root_path, settings.weight_root_path})

    def sweep(self, seen_to: Callable[[], None] = lambda: None) -> int:
        """Sees to every job that has ended.

        Args:
            seen_to: Called after each job.

        Returns:
            How many jobs it has looked at the files of.

        Raises:
            Unavailable: Redis, or the object store, is away.
        """
        num_jobs = 0
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
                num_jobs += 1
                seen_to()
        return num_jobs

    def remove(self, job_id: str) -> bool:
        """Removes the files of one job, as far as its removal is noted.

        Returns:
            True where there was a note; without one nothing is removed.

        Raises:
            Unavailable: Redis, or the object store, is away.
            OnbeatError: The system refuses.
        """
        removal = self._removals.notes().removals.get(job_id)
        if removal is not None:
            self._see_to_note(job_id, removal)
        return removal is not None

    def _due(self) -> Iterator[Step]:
        for due in due_jobs(self._broker, self._settings):
            yield due.job_id, functools.partial(self._put_aside, due)

    def _noted(self) -> Iterator[Step]:
        notes = self._removals.notes()
        for job_id, reason in sorted(notes.unreadable.items()):
            log.error("the note of %s in %s is left alone: %s", job_id, keys.REMOVED, reason)
        for job_id, removal in notes.removals.items():
            yield job_id, functools.partial(self._see_to_note, job_id, removal)

    def _left_behind(self) -> Iterator[Step]:
        folders = LeftFolders(self._settings)
        for job_id in self._forgotten():
            yield job_id, functools.partial(self._see_to_left, job_id, folders)
        folders.save()

    def _put_aside(self, due: DueJob) -> None:
        if put_aside(self._broker, self._folder_of(due.job_id), due):
            log.info("the audit chain of %s is in its run folder: Redis may forget the job", due.job_id)
        self._files_of(due.job_id).record(is_forgotten=False)

    def _see_to_note(self, job_id: str, removal: Removal) -> None:
        folder, files = self._folder_of(job_id), self._files_of(job_id)
        if job_id in JobStore(self._broker).job_ids():
            log.error("the files of %s stay: it is noted as removed, and Redis knows the job", job_id)
            return
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

    def _see_to_left(self, job_id: str, folders: LeftFolders) -> None:
        left = folders.of(self._folder_of(job_id))
        now_s = time.time()
        # A fork that has not ended may begin with its checkpoint, again.
        if left is None or (left.is_due(now_s) and JobStore(self._broker).forks_of(job_id)):
            return
        if left.is_over(now_s):
            self._removals.note(job_id, Removal(files="removed", at_s=now_s))
            return
        removed = left.reduce(now_s, lambda paths: self._files_of(job_id).forget(paths))
        folders.keep(left)
        if removed:
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
    # Another worker was faster, or the folder is gone: the next sweep sees.
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
    ):  # another worker was faster, or no folder
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
    reach("tasks.putting_aside")
    scratch.rename(path)
    sync(path.parent)
