"""The trainer that this worker runs as a process of its own: one at a time, its log in the run folder of its job.

A trainer ends with its worker: by SIGTERM in an orderly end, by the kernel when the worker is killed (Linux).
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import OnbeatError
from contracts.run_folder import RunFolder
from contracts.settings import PREFIX
from onbeat.base.process.child_process import ChildProcess, bound_log
from onbeat.base.process.ending import END_S
from onbeat.base.process.folders import make_private
from onbeat.base.process.host_memory import with_large_pages

STOP_GRACE_S = END_S - 1.0
"""From the SIGTERM: no shorter than the time that a trainer, or the launcher of its ranks, gives itself to its end; and
a second is left to say how it ended. What a SIGKILL then costs is done again from the checkpoint before."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """A trainer process that is over. `TrainerProcess.reap` creates it, and the reconciler books it."""

    job_id: str
    exit_code: int
    """A `TrainerExit`, or the negative number of a signal."""
    was_asked: bool = False
    """True where this worker asked it to end."""

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"the trainer of {self.job_id} was killed by signal {-self.exit_code}"
        return f"the trainer of {self.job_id} ended with code {self.exit_code}"


def trainer_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the worker's environment without its name, and with the trainer's own port of metrics."""
    port = inherited.get(f"{PREFIX}TRAINER_METRICS_PORT", "0")
    environment = {name: value for name, value in inherited.items() if name != f"{PREFIX}NAME"}
    environment[f"{PREFIX}METRICS_PORT"] = port
    return with_large_pages(environment)


class TrainerProcess:
    """The trainer of a worker, at most one process. The worker's main thread starts, reaps and stops it."""

    def __init__(self, run_root: Path, *, module: str = "consumer") -> None:
        self._run_root = run_root
        self._module = module
        self.job_id = ""
        """The job of the trainer that runs here; "" when there is none."""
        self.has_held = False
        """The trainer was seen with its job's lease; until then it has nothing to save."""
        self._child: ChildProcess | None = None
        self._answered_s = 0.0
        self._lapsed_s: float | None = None
        self._asked_s: float | None = None
        """The monotonic time at which it was first asked to end; None before."""

    @property
    def silent_s(self) -> float:
        """Seconds since the trainer was started, or last held its job's lease."""
        return time.monotonic() - self._answered_s

    @property
    def is_running(self) -> bool:
        """True while the process runs; any thread may read it."""
        child = self._child
        return child is not None and child.is_running

    def answered(self) -> None:
        """Notes that the trainer holds its job's lease."""
        self._answered_s = time.monotonic()
        self._lapsed_s = None
        self.has_held = True

    def lapsed(self) -> float:
        """Notes that its lease has run out, and returns the seconds since that was first seen.

        By this worker's clock: a lease that ran out while Redis was away is one that the trainer couldn't renew.
        """
        if self._lapsed_s is None:
            self._lapsed_s = time.monotonic()
        return time.monotonic() - self._lapsed_s

    def ask_to_end(self) -> None:
        """Sends SIGTERM, without waiting; a signal handler may call it."""
        if self._child is not None and self._child.is_running:
            # Noted before the signal: the end that it causes must not be booked as the trainer's own.
            if self._asked_s is None:
                self._asked_s = time.monotonic()
            self._child.terminate()

    def start(self, job_id: str) -> None:
        """Starts a job's trainer. Raises OnbeatError where its log or the program cannot be opened."""
        assert not self.job_id, f"a trainer for {self.job_id} runs here"
        child = self._child_for(job_id)
        try:
            make_private(child.log_path.parent)
            child.start()
        except (OSError, OnbeatError) as error:
            problem = str(error)
            if isinstance(error, OnbeatError):
                problem = error.problem
            raise OnbeatError(
                f"cannot start a trainer: {problem}",
                field=str(child.log_path),
                cure="choose another run root",
            ) from error
        self._child = child
        self.job_id = job_id
        self._answered_s = time.monotonic()
        self._lapsed_s = None
        self.has_held = False
        self._asked_s = None
        log.info("started a trainer for %s, process %d, log %s", job_id, child.pid, child.log_path)

    def reap(self) -> Ended | None:
        """Returns the trainer that ended since the last call, and kills the processes that it left. Bounds its log."""
        if self._child is None:
            return None
        bound_log(self._child.log_path)
        code = self._child.exit_code
        if code is None:
            return None
        ended = Ended(self.job_id, code, was_asked=self._asked_s is not None)
        # Its process group: ranks and other children that it left behind.
        self._child.kill()
        self._child = None
        self.job_id = ""
        return ended

    def kill(self) -> None:
        """Sends SIGKILL to the trainer and to what it started; it is reaped as any other. Any thread may call it."""
        child = self._child
        if child is not None:
            child.kill()

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> Ended | None:
        """Sends SIGTERM, and SIGKILL grace_s after the first one that it was sent."""
        if self._child is None:
            return None
        self.ask_to_end()
        asked_s = self._asked_s
        if asked_s is None:
            asked_s = time.monotonic()
        if not self._child.wait(max(0.0, asked_s + grace_s - time.monotonic())):
            log.warning("the trainer of %s did not end within %.0f s, killing it", self.job_id, grace_s)
        self.kill()
        return self.reap()

    def tail(self, job_id: str, num_lines: int = 3) -> str:
        """Returns the last lines of the job's trainer log, joined to one line."""
        try:
            text = self._child_for(job_id).tail(num_lines=100)
        except OSError as error:
            return f"(no log: {error.strerror})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-num_lines:]) or "(no log)"

    def _child_for(self, job_id: str) -> ChildProcess:
        return ChildProcess(
            f"trainer of {job_id}",
            command=(sys.executable, "-m", self._module, job_id),
            environment=trainer_environment(os.environ),
            log_path=RunFolder(self._run_root, job_id).trainer_log,
        )
