"""Keeps the trainer's lease alive beside the training, and notices what the trainer must react to."""

from __future__ import annotations

import logging
import threading

from broker.trainer_side import TrainerSide
from contracts.errors import OnbeatError
from contracts.jobs import JobState

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """The job was asked to end."""


class Stopped(Exception):
    """This process was asked to end; the job goes on in another one."""


class LeaseKeeper:
    """A thread that renews the lease every third of it, and every second so that a cancel is soon noticed.

    The trainer calls `check` between micro-batches: what the thread saw is raised there, where it can be answered.
    """

    def __init__(self, side: TrainerSide, *, lease_s: float) -> None:
        self._side = side
        self._interval_s = min(lease_s / 3, 1.0)
        self._state = JobState.RUNNING
        self._error: OnbeatError | None = None
        self._closing = threading.Event()
        self._stop_requested = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def request_stop(self) -> None:
        """From a signal handler: `check` raises Stopped from now on."""
        self._stop_requested.set()

    def check(self) -> None:
        """Raises what ended the renewals (FencedOff, BrokerUnavailable), Stopped, or Cancelled."""
        self.check_lease()
        if self._stop_requested.is_set():
            raise Stopped
        if self._state is JobState.CANCELLING:
            raise Cancelled

    def check_lease(self) -> None:
        """Raises only what ended the renewals."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            try:
                self._state = self._side.renew()
            except OnbeatError as error:
                log.warning("the trainer's lease: %s", error)
                self._error = error
                return
