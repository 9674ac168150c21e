"""The worker's look at its jobs: at once where one has changed, and every other second.

    a change, or LOOK_EVERY_S ─▶ reconcile, and SWEEP_EVERY_S after the last one: sweep ─▶ … ─▶ stop: its trainer ends

No change need be heard of: what is true stands in the job store and the fence, and a Redis that is away, or has lost
its last writes, costs two seconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from broker.job_store import JobStore
from consumer.supervisor.reconciler import Reconciler
from consumer.supervisor.sweeper import Sweeper
from contracts.errors import Unavailable

LOOK_EVERY_S = 2.0
LISTEN_S = 10.0
SWEEP_EVERY_S = 60.0
"""Ended jobs, and what becomes of their keys and files."""

log = logging.getLogger(__name__)


class LookOut:
    """Runs in the main thread, which starts the trainer: the kernel ends a trainer whose starter's thread is gone."""

    def __init__(self, reconciler: Reconciler, sweeper: Sweeper, jobs: JobStore) -> None:
        self._reconciler = reconciler
        self._sweeper = sweeper
        self._jobs = jobs
        self._wakes = threading.Event()
        self._stopping = False
        self._swept_s = float("-inf")

    def stop(self) -> None:
        """`run` returns once the trainer that runs here has ended. A signal handler may call it."""
        self._stopping = True
        self._wakes.set()

    def run(self) -> None:
        """Looks until `stop`."""
        threading.Thread(target=self._listen, name="changes", daemon=True).start()
        while not self._stopping:
            self._wakes.clear()
            self.look()
            if not self._stopping:
                self._wakes.wait(LOOK_EVERY_S)
        self._unless_away(self._reconciler.close)

    def look(self) -> None:
        """Sees to the active jobs, and to the ended ones where that is due."""
        self._unless_away(self._reconciler.reconcile)
        if time.monotonic() - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self._sweeper.begin()

    def _listen(self) -> None:
        newest = "0"
        while not self._stopping:
            try:
                last, (newest, has_removed) = newest, self._jobs.wait_for_changes(newest, LISTEN_S)
            except Unavailable:
                time.sleep(LOOK_EVERY_S)
                continue
            if has_removed:
                self._sweeper.begin()
            if newest != last:
                self._wakes.set()

    @staticmethod
    def _unless_away(work: Callable[[], None]) -> None:
        """A server that is away ends the look, not the worker: the next one comes soon."""
        try:
            work()
        except Unavailable as error:
            log.warning("cannot look at the jobs now: %s", error)
