"""A process of the stack as its launcher has it: its own process group, its own log file, no orphans at its end.

A psutil.Process is a number with the start time: a stranger that was given the number of a dead process is neither
found as living nor killed.

A child dies with its launcher: on Linux the kernel sends it SIGTERM when the thread that started it ends, so start
children from a thread that lives as long as they should. Elsewhere a child ends when it loses Redis.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import psutil

from contracts.errors import Unavailable
from onbeat.base.process.folders import make_missing, writable_run_dir
from onbeat.base.process.launcher import end_with_launcher, with_own_packages
from onbeat.base.process.signals import uninterrupted

TAIL_BYTES = 16_384
MAX_LOG_BYTES = 32 * 2**20
OLDER = ".1"
"""Behind the name of a log: what stood in it when it reached its bound."""


def bound_log(path: Path, *, most_bytes: int = MAX_LOG_BYTES) -> None:
    """Empties a log that has reached its bound, and keeps what stood there in place of what was kept before.

    Its writer goes on at the beginning: it appends. What it writes during the copy is lost. What isn't a plain file
    is left alone.
    """
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(number, "rb") as log_file:
            state = os.fstat(number)
            if stat.S_ISREG(state.st_mode) and state.st_size > most_bytes:
                older = path.with_name(path.name + OLDER)
                older.unlink(missing_ok=True)
                with open(os.open(older, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
                    shutil.copyfileobj(log_file, copy)
                os.ftruncate(number, 0)


@dataclass(eq=False)
class ChildProcess:
    """A process that this one starts, watches and ends: it has its own process group, and appends to a log file.

    The stack, the consumer's supervisor and tests create it. `start` may be called again after its end.
    """

    name: str
    _: KW_ONLY
    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    cwd: Path | None = None
    kept_open: Sequence[int] = ()
    """Descriptors of this process that the child inherits."""

    def __post_init__(self) -> None:
        self.environment = with_own_packages(self.environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None before the first start."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """None while it runs and before the first start; negative: the signal that ended it."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises Unavailable if the program cannot be executed, InvalidInput if its log cannot be written."""
        make_missing(self.log_path.parent)
        with writable_run_dir():
            log_file = self.log_path.open("ab")
        with log_file, uninterrupted(answered_after=True):
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=subprocess.STDOUT,
                    env=self.environment,
                    cwd=self.cwd,
                    process_group=0,
                    pass_fds=self.kept_open,
                    preexec_fn=end_with_launcher(),
                )
            except OSError as error:
                raise Unavailable(f"cannot be started: {error}", field=self.name) from error

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end. Returns True where it ended within the time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """Sends SIGTERM, without waiting."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    def stop(self, *, grace_s: float = 10.0) -> None:
        """Sends SIGTERM, then SIGKILL after the grace; processes that it started and left behind are killed too."""
        if self._process is None:
            return
        offspring = self._offspring()
        self.terminate()
        if not self.wait(grace_s):
            offspring |= self._offspring()
        self._end_group()
        kill_all(offspring)

    def kill(self) -> None:
        """Sends SIGKILL to its process group, as a crash would end it."""
        if self._process is not None:
            offspring = self._offspring()
            self._end_group()
            kill_all(offspring)

    def tail(self, num_lines: int = 12) -> str:
        """Returns the last lines of its log."""
        if not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])

    def _offspring(self) -> set[psutil.Process]:
        """Returns the processes that it has started; none once it was reaped, when its number may be a stranger's."""
        if self._process is None or not self.is_running:
            return set()
        return descendants(self._process.pid)

    def _end_group(self) -> None:
        assert self._process is not None
        # A process that was reaped no longer owns its number, but members of its group keep the group number taken.
        # macOS answers EPERM for a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def descendants(pid: int) -> set[psutil.Process]:
    """Returns the living children of `pid`, their children and so on."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return living(psutil.Process(pid).children(recursive=True))
    return set()


def marked(name: str, value: str) -> set[psutil.Process]:
    """Returns this user's living processes whose environment at their start had `name=value`; their parent doesn't
    matter.
    """
    return _matching(lambda process: process.environ().get(name) == value)


def running(module: str, argument: str) -> list[int]:
    """Returns the process ids of every `python -m MODULE ARGUMENT` that runs now."""
    return [process.pid for process in _matching(lambda process: process.cmdline()[-3:] == ["-m", module, argument])]


def living(processes: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Returns the processes that still run; zombies do not."""
    alive: set[psutil.Process] = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process)
    return alive


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Sends SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _matching(is_wanted: Callable[[psutil.Process], bool]) -> set[psutil.Process]:
    """Returns the machine's processes that `is_wanted` accepts; those that may not be looked at are left out."""
    wanted: set[psutil.Process] = set()
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error):  # another user's process, or one that ended
            process = psutil.Process(pid)
            if is_wanted(process):
                wanted.add(process)
    return wanted
