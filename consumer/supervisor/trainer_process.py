"""The trainer that this consumer runs as a process of its own: one at a time, its log in the run folder of its job.

A trainer ends with its consumer: by SIGTERM in an orderly end, by the kernel when the consumer is killed (Linux).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import OnbeatError
from contracts.run_folder import RunFolder
from contracts.settings import PREFIX
from process.launcher import end_with_launcher
from process.private_folders import make_private

TAIL_BYTES = 8_192
STOP_GRACE_S = 15.0
"""For the current micro-batch and a checkpoint. What a SIGKILL then costs is done again from the checkpoint before."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """A trainer process that is over."""

    job_id: str
    exit_code: int
    """Of `python -m consumer` (`TrainerExit`); negative: a signal."""
    asked: bool = False
    """It was asked to end, by this process."""

    def __str__(self) -> str:
        how = f"was killed by signal {-self.exit_code}" if self.exit_code < 0 else f"ended with code {self.exit_code}"
        return f"the trainer of {self.job_id} {how}"


def trainer_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The consumer's own, without what only the consumer needs: a trainer sends no Celery messages."""
    return {name: value for name, value in inherited.items() if name != f"{PREFIX}CELERY_URL"}


class TrainerProcesses:
    """Not thread-safe: the worker's main thread starts, reaps and stops."""

    def __init__(self, run_root: Path, *, module: str = "consumer") -> None:
        self._run_root = run_root
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._job_id = ""
        self._answered_s = 0.0
        self._has_held = False
        self._asked = False

    @property
    def job_id(self) -> str:
        """Of the trainer that runs here; "" when there is none."""
        return self._job_id

    @property
    def silent_s(self) -> float:
        """Since the trainer was started, or last held its job's lease."""
        return time.monotonic() - self._answered_s

    @property
    def has_held(self) -> bool:
        """The trainer was seen with its job's lease; until then it has nothing to save."""
        return self._has_held

    @property
    def is_running(self) -> bool:
        """Safe to ask from another thread."""
        process = self._process
        return process is not None and process.poll() is None

    def answered(self) -> None:
        """The trainer holds its job's lease."""
        self._answered_s = time.monotonic()
        self._has_held = True

    def ask_to_end(self) -> None:
        """SIGTERM, without waiting: for a signal handler."""
        if self.is_running:
            self._asked = True
            assert self._process is not None
            self._process.terminate()

    def start(self, job_id: str) -> None:
        """Raises OnbeatError where its log or the program cannot be opened."""
        assert not self._job_id, f"a trainer for {self._job_id} runs here"
        path = RunFolder(self._run_root, job_id).trainer_log
        try:
            make_private(path.parent)
            with path.open("ab") as log_file:
                self._process = subprocess.Popen(
                    (sys.executable, "-m", self._module, job_id),
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    env=trainer_environment(os.environ),
                    process_group=0,
                    preexec_fn=end_with_launcher(),
                )
        except OSError as error:
            raise OnbeatError(
                f"cannot start a trainer: {error}", field=str(path), cure="choose another run root"
            ) from error
        self._job_id = job_id
        self._answered_s = time.monotonic()
        self._has_held = self._asked = False
        log.info("started a trainer for %s, process %d, log %s", job_id, self._process.pid, path)

    def reap(self) -> Ended | None:
        """The trainer that ended since the last call."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        ended = Ended(self._job_id, code, asked=self._asked)
        self.end_group()
        self._process, self._job_id = None, ""
        return ended

    def kill(self) -> None:
        """SIGKILL to a trainer that no longer answers; it is reaped as any other."""
        if self._process is not None:
            self.end_group()
            self._process.wait()

    def stop(self, *, grace_s: float = STOP_GRACE_S) -> Ended | None:
        """SIGTERM, then SIGKILL after the grace."""
        if self._process is None:
            return None
        self.ask_to_end()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.warning("the trainer of %s did not end within %.0f s, killing it", self._job_id, grace_s)
        self.kill()
        return self.reap()

    def tail(self, job_id: str, num_lines: int = 3) -> str:
        """The last lines of the job's trainer log, in one line."""
        path = RunFolder(self._run_root, job_id).trainer_log
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error.strerror})"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-num_lines:])

    def end_group(self) -> None:
        """SIGKILL, without waiting: what a trainer started and left behind goes with it."""
        if self._process is None:
            return
        # Members of a group keep its number taken after its leader was reaped. macOS answers EPERM for zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
