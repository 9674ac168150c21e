"""What a consumer does for jobs that have ended: their files become what their removal, or their retention, says.

sweep() ─┬▶ ended jobs that are due ──▶ audit chain and status into the run folder; the gateway removes the keys
         ├▶ onbeat:removed ─┬─ removed: the run folder goes, and the job's folder of the weight root
         │                  └─ kept:    what was put aside gets its name
         └▶ run folders of forgotten jobs ──▶ reduced to their result, or noted for removal
Each step is safe to repeat, by any number of consumers, and goes on where a killed one stopped.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.removals import MADE_HERE, Removal, Removals
from broker.retention import DueJob, due_jobs
from consumer.supervisor.left_folders import LeftFolder, left_folder
from consumer.supervisor.put_aside import name_it, put_aside
from contracts.errors import NotFound, OnbeatError, Unavailable
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.process.tree_removal import remove_tree

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import WorkerMetrics

LATE_S = 600.0
"""So long a removal is looked at again: a trainer that slept through it may still write a file, or a start make one."""

log = logging.getLogger(__name__)

Step = tuple[str, Callable[[], None]]
"""A job's id, and what is to be done for it."""


class Sweeper:
    """One consumer's; what takes long on a slow file system must not keep it from its trainer."""

    def __init__(self, broker: Broker, settings: StackSettings, metrics: WorkerMetrics | None = None) -> None:
        self._broker = broker
        self._settings = settings
        self._metrics = metrics
        self._removals = Removals(broker)
        self._roots = tuple({settings.run_root_path, settings.weight_root_path})
        self._left: dict[str, LeftFolder] = {}
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
        if self._metrics is not None:
            self._metrics.unreadable_removals.set(len(notes.unreadable))
        for job_id, removal in notes.removals.items():
            yield job_id, functools.partial(self._see_to_note, job_id, removal)

    def _left_behind(self) -> Iterator[Step]:
        for job_id in self._forgotten():
            yield job_id, functools.partial(self._see_to_left, job_id)

    def _put_aside(self, due: DueJob) -> None:
        if put_aside(self._broker, self._folder_of(due.job_id), due):
            log.info("the audit chain of %s is in its run folder: Redis may forget the job", due.job_id)

    def _see_to_note(self, job_id: str, removal: Removal) -> None:
        if removal.files == "kept":
            name_it(self._folder_of(job_id))
        else:
            removed = [remove_tree(root / job_id) for root in self._roots]
            if any(removed):
                log.info("the files of %s are removed", job_id)
            if time.time() - removal.at_s < LATE_S:
                return
        self._removals.done(job_id)

    def _forgotten(self) -> list[str]:
        """Run folders of no job that Redis knows."""
        root = self._settings.run_root_path
        there = [path.name for path in root.iterdir() if MADE_HERE.fullmatch(path.name)] if root.is_dir() else []
        notes = self._removals.notes()
        known = {*JobStore(self._broker).job_ids(), *notes.removals, *notes.unreadable}
        return [job_id for job_id in there if job_id not in known]

    def _see_to_left(self, job_id: str) -> None:
        left = self._left.get(job_id) or left_folder(self._folder_of(job_id), self._settings)
        if left is None:
            return
        self._left[job_id] = left
        now_s = time.time()
        if left.is_over(now_s):
            self._removals.note(job_id, Removal(files="removed", at_s=now_s))
            del self._left[job_id]
        elif removed := left.reduce(now_s):
            log.info("%s is reduced to its result: %s are removed", job_id, ", ".join(path.name for path in removed))

    def _folder_of(self, job_id: str) -> RunFolder:
        settings = self._settings
        weight_root = settings.weight_root_path if settings.weight_root else None
        return RunFolder(settings.run_root_path, job_id, weight_root=weight_root)
