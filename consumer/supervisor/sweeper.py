"""What a consumer does for jobs that have ended: their files become what their removal says.

sweep() ─▶ onbeat:removed ─┬─ removed: the run folder goes, and the job's folder of the weight root
                           └─ kept:    the audit chain that was put aside gets its name
Each step is safe to repeat, by any number of consumers, and goes on where a killed one stopped.
"""

from __future__ import annotations

import logging
import threading
import time

from broker.connection.client import Broker
from broker.removals import Removal, Removals
from contracts.errors import OnbeatError, Unavailable
from contracts.settings import StackSettings
from process.tree_removal import remove_tree

LATE_S = 600.0
"""So long a removal is looked at again: a trainer that slept through it may still write a file, or a start make one."""

log = logging.getLogger(__name__)


class Sweeper:
    """One consumer's; what takes long on a slow file system must not keep it from its trainer."""

    def __init__(self, broker: Broker, settings: StackSettings) -> None:
        self._removals = Removals(broker)
        self._roots = tuple({settings.run_root_path, settings.weight_root_path})
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
        """Sees to every note. Raises Unavailable."""
        for job_id, removal in self._removals.pending().items():
            try:
                self._see_to(job_id, removal)
            except Unavailable:
                raise
            except OnbeatError as error:
                log.error("the files of %s stay for now: %s", job_id, error)

    def _see_to(self, job_id: str, removal: Removal) -> None:
        """Raises OnbeatError where the file system refuses."""
        if removal.files == "removed":
            removed = [remove_tree(root / job_id) for root in self._roots]
            if any(removed):
                log.info("the files of %s are removed", job_id)
            if time.time() - removal.at_s < LATE_S:
                return
        self._removals.done(job_id)
