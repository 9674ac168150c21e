"""A Python interpreter for programs that a model wrote: a process of its own for each, which ends with it.

    an environment's process ─ exec, once ─▶ zygote: locked in further ─ fork ─▶ program ─ bounded output ─▶ answer

A program has no memory of the environment's (the answers are there): the zygote is started anew, not forked from it.
It has no network, no files, no processes and no signals; a limit on its memory and on its processor time. Equal
programs have equal answers: hashes, random numbers and the clock begin alike, and no address is shown. What a program
that took too long had said until then isn't, either. What no lock makes equal is a program whose processor time or
memory ends just at its limit, or that goes looking for a clock in the modules' own modules.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

from contracts.encoding.wire import Record, decode, encode
from onbeat.base.cage import kernel
from onbeat.base.cage.frames import Frames, Gone, Late

MAX_CODE_CHARS = 65536
MAX_ANSWER_BYTES = 1024 * 1024
WAIT_FACTOR = 20.0
WAIT_S = 10.0
"""A program that has its processor time left after this much more of the clock is stuck: an error, and no answer."""
START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from onbeat.environments.tools.addresses import keep_addresses
keep_addresses()
from onbeat.environments.tools.program import serve
serve(int(sys.argv[1]))
"""


class Program(Record, frozen=True, kw_only=True):
    """A program for the zygote to run, with its limits."""

    code: str
    cpu_s: int
    memory_mb: int
    output_chars: int


class Ran(Record, frozen=True, kw_only=True):
    """The end of a program, as the model sees it."""

    answer: str


class ProgramStuck(Exception):
    """A program neither ended nor used its processor time: a fault of the machine, not of the program."""


class Python:
    """Runs programs, one at a time, without a state between them."""

    def __init__(self, *, cpu_s: int = 2, memory_mb: int = 256, output_chars: int = 4000) -> None:
        if not (1 <= cpu_s <= 60 and 32 <= memory_mb <= 4096 and 1 <= output_chars <= 200_000):
            raise ValueError("a program has 1 to 60 s, 32 to 4096 MiB and 1 to 200000 characters of output")
        self._cpu_s = cpu_s
        self._memory_mb = memory_mb
        self._output_chars = output_chars

    def run(self, code: str) -> str:
        """Returns the output of a program, or an error in words for the model. Raises ProgramStuck."""
        if len(code) > MAX_CODE_CHARS:
            return f"error: a program has {MAX_CODE_CHARS} characters at most"
        program = Program(code=code, cpu_s=self._cpu_s, memory_mb=self._memory_mb, output_chars=self._output_chars)
        deadline_s = time.monotonic() + WAIT_S + WAIT_FACTOR * self._cpu_s
        try:
            frames = _zygote()
            frames.send(encode(program), deadline_s=deadline_s)
            return decode(frames.receive(deadline_s=deadline_s), Ran).answer
        except (Late, Gone) as error:
            _forget()
            raise ProgramStuck("the Python interpreter did not answer") from error


_running: list[tuple[Frames, subprocess.Popen[bytes]]] = []


def _zygote() -> Frames:
    """Returns the process's one zygote, started when it is first used."""
    if not _running:
        kernel.hide_from_own_uid(hidden=True)  # from here on no process of this user reads this one's memory
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-s", "-P", "-c", START, str(theirs.fileno()), json.dumps(sys.path)],
                env={"PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        _running.append((Frames(ours, max_bytes=MAX_ANSWER_BYTES), process))
    return _running[0][0]


def _forget() -> None:
    frames, process = _running.pop()
    frames.close()
    process.kill()
    process.wait()


def is_available() -> bool:
    """Returns whether a zygote can be started here, which needs fork."""
    return hasattr(os, "fork")
