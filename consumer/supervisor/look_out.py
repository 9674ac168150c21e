"""The worker's look at its jobs, every other second, in a thread of its own, and at once where a message asks for it.

    a message, or LOOK_EVERY_S ─▶ reconcile, and SWEEP_EVERY_S after the last one: sweep ─▶ … ─▶ stop: its trainer ends

No message is needed for it: a Redis at `maxmemory` takes none, and only the commit of a trainer makes room there.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from consumer.supervisor.reconciler import Reconciler
from consumer.supervisor.sweeper import Sweeper
from contracts.errors import Unavailable

LOOK_EVERY_S = 2.0
SWEEP_EVERY_S = 60.0
"""Ended jobs, and what becomes of their keys and files."""

log = logging.getLogger(__name__)


class LookOut(threading.Thread):
    """The thread that starts the worker's trainer: the kernel ends a trainer whose thread is gone, so it lives on."""

    def __init__(self, reconciler: Reconciler, sweeper: Sweeper) -> None:
        super().__init__(name="look-out", daemon=True)
        self._reconciler = reconciler
        self._sweeper = sweeper
        self._wakes = threading.Event()
        self._stopping = False
        self._swept_s = float("-inf")
        self.died = False

    def wake(self) -> None:
        """Looks at once; any thread may ask."""
        self._wakes.set()

    def stop(self) -> None:
        """Ends the trainer that runs here, and returns once it has ended."""
        self._stopping = True
        self.wake()
        self.join()

    def run(self) -> None:
        try:
            while not self._stopping:
                self._wakes.clear()
                self.look()
                self._wakes.wait(LOOK_EVERY_S)
            self._unless_away(self._reconciler.close)
        finally:
            if not self._stopping:
                log.critical("the look at the jobs died: this worker ends")
                self.died = True
                os.kill(os.getpid(), signal.SIGTERM)

    def look(self) -> None:
        """Sees to the active jobs, and to the ended ones where that is due."""
        self._unless_away(self._reconciler.reconcile)
        if time.monotonic() - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self._sweeper.begin()

    @staticmethod
    def _unless_away(work: Callable[[], None]) -> None:
        """A server that is away ends the look, not the worker: the next one comes soon."""
        try:
            work()
        except Unavailable as error:
            log.warning("cannot look at the jobs now: %s", error)
