"""The zygote of the Python tool, and the program that it forks: locked in, bounded, and alike each time."""

from __future__ import annotations

import ast
import builtins
import contextlib
import enum
import gc
import io
import os
import random
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from contracts.encoding.wire import decode, encode
from onbeat.base.cage import kernel
from onbeat.base.cage.file_rules import close_all_files, restrict_files
from onbeat.base.cage.frames import Frames, Gone
from onbeat.base.cage.syscall_filter import compiled, lock_syscalls
from onbeat.base.cage.syscall_rules import PROGRAM
from onbeat.environments.tools.python import Program, Ran

MODULES = frozenset(
    [
        "abc",
        "array",
        "bisect",
        "calendar",
        "cmath",
        "collections",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "numbers",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "textwrap",
        "typing",
        "unicodedata",
    ]
)
"""Modules that a program may import. The list is no lock, which the kernel's are: it keeps out what differs from time
to time, unless a program goes looking for it."""
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
MAX_ERROR_LINES = 12
READ_BYTES = 65536
MAX_BYTES_A_CHAR = 4
WAIT_S, WAIT_FACTOR = 5.0, 10.0
LOOK_S = 0.25
LOOKS_WITHOUT_TIME = 8
"""A program that says nothing and uses no processor time, as often as it is looked at, waits for what never comes."""
MOMENT_S = 0.002
RUNS = "RD"
"""The kernel's states of a process that only waits for the machine: for a processor, or for a disk."""
TIMED_OUT = (signal.SIGXCPU, signal.SIGKILL)
"""The kernel's signals at the limits of processor time; a program can send none."""
WAITED = "error: it waits for something that never comes"
CPUCLOCK_SCHED = 2
"""The kernel's mark of a process's clock in the clock's number."""
NAME = "<program>"


class Ended(enum.Enum):
    """How a program's output came to its end."""

    SAID_ALL = enum.auto()
    LONG = enum.auto()
    WAITS = enum.auto()
    STUCK = enum.auto()


class Watch:
    """Tells a program that waits for what never comes, which is answered, from one that the machine keeps waiting."""

    def __init__(self, child: int, ends_s: float) -> None:
        self._child = child
        self._ends_s = ends_s
        self._next_s = time.monotonic() + LOOK_S
        self._num_looks = 0
        self._used_ns = -1

    def starts_anew(self) -> None:
        """It has said something."""
        self._num_looks = 0

    def look(self) -> Ended | None:
        """WAITS, STUCK, or None while there is hope. May be called at any time; it looks every LOOK_S."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + LOOK_S
        before_ns, self._used_ns = self._used_ns, _used_ns(self._child)
        waits = _state(self._child) not in RUNS
        self._num_looks = self._num_looks + 1 if waits and self._used_ns == before_ns else 0
        if self._num_looks == LOOKS_WITHOUT_TIME:
            return Ended.WAITS
        if now_s <= self._ends_s:
            return None
        return Ended.WAITS if waits else Ended.STUCK


_FILTER = compiled(PROGRAM)


def serve(handle: int) -> None:
    """Runs programs until its environment's process is gone."""
    kernel.end_with_parent(signal.SIGKILL)
    frames = Frames(socket.socket(fileno=handle), max_bytes=MAX_BYTES_A_CHAR * 70_000)
    _prepare()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    restrict_files(writable=None, readable=(), hidden=(), home="", tcp=False, abstract_sockets=False)
    gc.freeze()
    with contextlib.suppress(Gone):
        while True:
            frames.send(encode(Ran(answer=_run(decode(frames.receive(), Program), frames))))


def _prepare() -> None:
    """Imports all that programs may, stops the clock, and seeds what would seed itself."""
    __import__("_strptime")  # strptime imports it when it is first called
    for name in sorted(MODULES):
        __import__(name)
    _stop_clock()
    drawn = random.seed

    class Seeded(random.Random):
        def seed(self, a: Any = None, version: int = 2) -> None:
            super().seed(0 if a is None else a, version)

    def seed(a: Any = None, version: int = 2) -> None:
        drawn(0 if a is None else a, version)

    Seeded.__name__ = Seeded.__qualname__ = "Random"
    random.Random, random.seed = Seeded, seed  # type: ignore[misc]
    del random.SystemRandom


def _stop_clock() -> None:
    import datetime

    class Stopped(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2000, 1, 1, tzinfo=tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls(2000, 1, 1)

        @classmethod
        def today(cls) -> Any:
            return cls(2000, 1, 1)

    class StoppedDate(datetime.date):
        @classmethod
        def today(cls) -> Any:
            return cls(2000, 1, 1)

    Stopped.__name__, StoppedDate.__name__ = "datetime", "date"
    datetime.datetime, datetime.date = Stopped, StoppedDate  # type: ignore[misc]


def _run(program: Program, frames: Frames) -> str:
    """Forks the program, reads what it says, and waits for its end."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(out)
            frames.close()
            _be(program, into)
        finally:
            os._exit(1)
    os.close(into)
    watch = Watch(child, time.monotonic() + WAIT_S + WAIT_FACTOR * program.cpu_s)
    output, ended = _read(out, watch, MAX_BYTES_A_CHAR * program.output_chars)
    os.close(out)
    if ended is Ended.SAID_ALL:
        ended, status, used = _end(child, watch)
    else:
        status, used = _killed(child)
    by_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) in TIMED_OUT and ended is Ended.SAID_ALL
    is_taken = by_time and used.ru_utime + used.ru_stime < program.cpu_s / 2  # by the machine, for its memory
    if ended is Ended.STUCK or is_taken:
        os._exit(4)  # the tool's caller takes it for what it is: no answer
    if by_time:
        # How much it wrote until then is a question of the machine's speed.
        return f"error: it took more than {program.cpu_s} s of processor time"
    if ended is Ended.WAITS or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS):
        return WAITED
    return _answer(program, output, status, is_long=ended is Ended.LONG)


def _read(out: int, watch: Watch, limit: int) -> tuple[bytes, Ended]:
    """Returns the output of a program up to a limit, and why there is no more."""
    output = bytearray()
    while len(output) <= limit:
        has_more = bool(select.select([out], [], [], LOOK_S)[0])
        ended = watch.look()
        if ended is not None:
            return bytes(output), ended
        if not has_more:
            continue
        watch.starts_anew()
        data = os.read(out, READ_BYTES)
        if not data:
            return bytes(output), Ended.SAID_ALL
        output += data
    return bytes(output), Ended.LONG


def _end(child: int, watch: Watch) -> tuple[Ended, int, resource.struct_rusage]:
    """Waits for a program that says no more: its output is closed, by its end or by itself."""
    handle = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
    try:
        while True:
            if handle is None:
                time.sleep(MOMENT_S)
            else:
                select.select([handle], [], [], LOOK_S)
            pid, status, used = os.wait4(child, os.WNOHANG)
            if pid:
                return Ended.SAID_ALL, status, used
            ended = watch.look()
            if ended is not None:
                return ended, *_killed(child)
    finally:
        if handle is not None:
            os.close(handle)


def _killed(child: int) -> tuple[int, resource.struct_rusage]:
    os.kill(child, signal.SIGKILL)
    return os.wait4(child, 0)[1:]


def _used_ns(child: int) -> int:
    """Processor time of a process so far; where a system can't say, a number that is another one each time."""
    try:
        return time.clock_gettime_ns((~child << 3) | CPUCLOCK_SCHED)
    except (OSError, AttributeError):
        return time.monotonic_ns()


def _state(child: int) -> str:
    """Returns the kernel's letter for what a process does; a space where a system doesn't tell."""
    try:
        with open(f"/proc/{child}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1].decode()
    except OSError:
        return " "


def _answer(program: Program, output: bytes, status: int, *, is_long: bool) -> str:
    text = ADDRESS.sub("at 0x0", output.decode(errors="replace"))
    cut = text[: program.output_chars]
    lines = [cut.rstrip("\n")] if cut.strip() else []
    if len(text) > program.output_chars:
        lines.append(f"error: the output was cut after {program.output_chars} characters")
    elif os.WIFSIGNALED(status) and not is_long:
        lines.append(f"error: the program died of {signal.Signals(os.WTERMSIG(status)).name}")
    return "\n".join(lines) or "(no output)"


def _be(program: Program, into: int) -> None:
    """Becomes the program: its output goes into the pipe."""
    os.dup2(into, 1)
    os.dup2(into, 2)
    _lock(program)
    random.seed(0)
    builtins.__import__ = _importing(builtins.__import__)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w"), encoding="utf-8", errors="replace")
    try:
        _execute(program.code)
    except MemoryError:
        sys.stdout.write(f"MemoryError: more than {program.memory_mb} MiB\n")
    except SystemExit:
        pass
    except BaseException as error:
        # The model's program may raise anything; the model reads it as the tool's output.
        sys.stdout.write(_error_text(error))
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def _lock(program: Program) -> None:
    used = int(next((line.split()[1] for line in _status() if line.startswith("VmSize")), "0")) * 1024
    limits = {
        resource.RLIMIT_AS: used + program.memory_mb * 2**20,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in limits.items():
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (program.cpu_s, program.cpu_s + 1))
    os.closerange(3, 256)
    close_all_files()
    lock_syscalls(_FILTER)


def _status() -> list[str]:
    try:
        with open("/proc/self/status") as file:
            return file.readlines()
    except OSError:
        return []


def _importing(real: Any) -> Any:
    def importing(name: str, scope: Any = None, *arguments: Any) -> Any:
        if len(arguments) > 1 and isinstance(arguments[1], list):
            # C code, under the program's own scope: strftime imports time. No statement passes a list.
            return real(name, scope, *arguments)
        # Without a scope it is a call of __import__, which nothing but a program makes.
        is_own = scope is None or scope.get("__name__") == "__main__"
        if is_own and name.partition(".")[0] not in MODULES:
            raise ImportError(f"there is no module {name} here; there are: {', '.join(sorted(MODULES))}")
        return real(name, scope, *arguments)

    return importing


def _execute(code: str) -> None:
    """Runs a program; where it ends with an expression, its value is shown."""
    tree = ast.parse(code, NAME)
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body.pop()
    scope: dict[str, Any] = {"__name__": "__main__", "id": _counted_ids()}
    exec(compile(tree, NAME, "exec"), scope)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), scope)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")


def _counted_ids() -> Callable[[object], int]:
    """`id` without addresses, which differ from one process to the next: objects are counted as they are asked for."""
    known: dict[int, tuple[int, object]] = {}

    def counted(value: object, /) -> int:
        return known.setdefault(id(value), (16 * (len(known) + 1), value))[0]

    return counted


def _error_text(error: BaseException) -> str:
    """Returns the error as Python prints it, with the program's own lines alone."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    lines = [f"  line {frame.lineno}, in {frame.name}\n" for frame in frames[-MAX_ERROR_LINES:]]
    return "".join([*lines, *traceback.format_exception_only(error)[-MAX_ERROR_LINES:]])
