"""Removes the files of jobs whose keys are gone, for the tasks `remove_files` and `delete`.

onbeat:removed ─▶ remove_all(), remove() ─▶ the folder below run root and weight root goes, and its copies elsewhere

A folder goes under a hidden name first, so that no reader sees half of one, and a removal that was killed is found by
it; links are removed, never followed:

job-0123456789ab/  ─▶  .job-0123456789ab.removed/  ─▶  nothing

A folder without a note is never touched: a server that lost its data has forgotten every job.
Each step is safe to repeat, by any number of workers, and goes on where a killed one stopped. A step that runs again
late removes nothing of what came between: it goes by a note in Redis, whose job's id no other job ever has, and leaves
files alone of which Redis knows the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from broker import keys
from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.removals import Removals
from contracts.errors import OnbeatError, Unavailable
from contracts.run_folder import Removal, RunFolder
from contracts.settings import StackSettings
from onbeat.run_folder.run_files import run_files
from onbeat.tasks.removal.trees import remove_tree

if TYPE_CHECKING:
    from onbeat.run_folder.object_files import ObjectFiles

LATE_S = 600.0
"""So long a removal is looked at again: a trainer that slept through it may still write a file, or a start make one."""

REMOVAL_S = 60.0
"""Longest that one request waits for the store that has copies of the files."""

log = logging.getLogger(__name__)


class FileRemover:
    """Removes the files that notes in Redis name; a worker of tasks makes it, on the host that has the files."""

    def __init__(self, broker: Broker, settings: StackSettings) -> None:
        self._broker = broker
        self._settings = settings
        self._removals = Removals(broker)
        self._roots = tuple({settings.run_root_path, settings.weight_root_path})

    def remove_all(self, seen_to: Callable[[], None] = lambda: None) -> int:
        """Removes the files of every job that a note names.

        Args:
            seen_to: Called after each job.

        Returns:
            How many notes it has seen to.

        Raises:
            Unavailable: Redis, or the object store, is away.
        """
        notes = self._removals.notes()
        for job_id, reason in sorted(notes.unreadable.items()):
            log.error("the note of %s in %s is kept, because it can't be handled now: %s", job_id, keys.REMOVED, reason)
        for job_id, removal in notes.removals.items():
            try:
                self._see_to_note(job_id, removal)
            except Unavailable:
                raise
            except OnbeatError as error:
                log.error("the files of %s stay for now: %s", job_id, error)
            seen_to()
        return len(notes.removals)

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

    def _see_to_note(self, job_id: str, removal: Removal) -> None:
        if job_id in JobStore(self._broker).job_ids():
            log.error("the files of %s stay: it is noted as removed, and Redis knows the job", job_id)
            return
        if JobStore(self._broker).forks_of(job_id):
            return  # a fork was submitted since: the files go once it has ended
        is_removed = [remove_tree(root / job_id) for root in self._roots]
        files = self._files_of(job_id)
        if files is not None:
            files.remove()
        if any(is_removed):
            log.info("the files of %s are removed", job_id)
        # Until then a late writer may make the folder anew, and another host, which shares no folder, removes its own.
        if time.time() - removal.at_s >= LATE_S:
            self._removals.done(job_id)

    def _files_of(self, job_id: str) -> ObjectFiles | None:
        return run_files(self._settings, self._folder_of(job_id), deadline_s=REMOVAL_S)

    def _folder_of(self, job_id: str) -> RunFolder:
        settings = self._settings
        weight_root = settings.weight_root_path if settings.weight_root else None
        return RunFolder(settings.run_root_path, job_id, weight_root=weight_root)
