"""The proof that a fault happened and was healed: a signal is no fault before its process has ended, or stands still.

strike ─▶ ended (killed), stopped (paused) ─▶ the process under its name is another one, or went on, or its job did
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from onbeat.base.wrong_numbers import WrongEngines
from onbeat.chaos.result import Hit

SEEN_WITHIN_S = 5.0
POLL_S = 0.01
TRAINER = "trainer"


@dataclass
class Struck:
    """A process that was sent a signal, until its healing was seen. `strike_together` creates it; the round looks at
    it.
    """

    name: str
    """The name of a service of the stack, or TRAINER."""
    process: psutil.Process
    """Its number and its start time: a stranger with its number is not taken for it."""
    signal: int
    committed: int
    """Iterations that were committed by then."""
    seen: str = ""
    healed: str = ""

    @property
    def hit(self) -> Hit:
        return Hit(name=self.name, pid=self.process.pid, signal=self.signal, seen=self.seen, healed=self.healed)

    def see(self) -> None:
        """Takes note of the signal's effect."""
        status = _status(self.process)
        if not self.seen and not status:
            self.seen = "ended"
        elif not self.seen and status == psutil.STATUS_STOPPED:
            self.seen = "stopped"

    def look(self, pids: Mapping[str, int], *, committed: int, has_succeeded: bool) -> None:
        """Notes the first sign of its healing.

        Args:
            pids: The stack's services as they are now.
            committed: The number of the job's iterations that are committed.
            has_succeeded: True once the job has succeeded.
        """
        if self.healed or not self.seen:
            return
        status = _status(self.process)
        pid = pids.get(self.name, self.process.pid)
        if pid != self.process.pid and psutil.pid_exists(pid):
            self.healed = f"started again as {pid}"
        elif self.signal == signal.SIGSTOP and status not in ("", psutil.STATUS_STOPPED):
            self.healed = "went on"
        elif self.name == TRAINER and committed > self.committed:
            self.healed = f"iteration {committed - 1} was committed after it"
        elif self.name == TRAINER and has_succeeded:
            self.healed = "the job succeeded after it"


@dataclass
class StruckEngine(Struck):
    """A generator whose engine was told to compute wrongly: no signal, and no process that ends or stops."""

    engines: WrongEngines | None = None

    def see(self) -> None:
        if self.engines is not None and not self.seen and self.engines.is_seen(self.process.pid):
            self.seen = "computed wrongly"

    def look(self, pids: Mapping[str, int], *, committed: int, has_succeeded: bool) -> None:
        self.see()
        if self.healed or not self.seen:
            return
        pid = pids.get(self.name, self.process.pid)
        if pid != self.process.pid and psutil.pid_exists(pid):
            self.healed = f"started again as {pid}"
        elif self.engines is not None and self.engines.is_over(self.process.pid):
            self.healed = "loaded a version rightly"
        elif has_succeeded:
            self.healed = "the job succeeded after it"


def strike_engine(name: str, pid: int, engines: WrongEngines, fault: str, *, committed: int) -> StruckEngine:
    """Has a generator's engine compute wrongly from its next load on. Raises ProcessLookupError without a process."""
    try:
        process = psutil.Process(pid)
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(pid) from error
    engines.begin(pid, fault)
    return StruckEngine(name=name, process=process, signal=0, committed=committed, engines=engines)


def strike(name: str, pid: int, number: int, *, committed: int) -> Struck:
    """Sends the signal, and waits a while until its effect is seen. Raises ProcessLookupError without a process."""
    (struck,) = strike_together([(name, pid)], number, committed=committed, within_s=SEEN_WITHIN_S)
    return struck


def strike_together(
    processes: Sequence[tuple[str, int]], number: int, *, committed: int, within_s: float
) -> list[Struck]:
    """Sends a signal to all processes, and waits until its effect is seen on each.

    Args:
        processes: Names and process ids.
        number: The signal.
        committed: The number of the job's iterations that are committed.
        within_s: The longest wait, in seconds.

    Raises:
        ProcessLookupError: A process is gone; no signal was sent then.
    """
    struck = []
    for name, pid in processes:
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ProcessLookupError(pid) from error
        if not _status(process):
            raise ProcessLookupError(pid)  # another fault has ended it, and nothing stands in its place yet
        struck.append(Struck(name=name, process=process, signal=number, committed=committed))
    for target in struck:
        with contextlib.suppress(ProcessLookupError):  # it ended with another one, as a trainer does with its consumer
            os.kill(target.process.pid, number)
    deadline_s = time.monotonic() + within_s
    while True:
        for target in struck:
            target.see()
        if all(target.seen for target in struck) or time.monotonic() >= deadline_s:
            return struck
        time.sleep(POLL_S)


def _status(process: psutil.Process) -> str:
    """Returns the process's state as psutil names it; "" for one that has ended."""
    try:
        status = process.status() if process.is_running() else psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return ""
    return "" if status == psutil.STATUS_ZOMBIE else status
