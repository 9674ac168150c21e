"""A trainer's log on the worker's stderr too, where `docker compose logs` finds it.

trainer ─ appends ─▶ trainer.log ─ read every LOOK_S ─▶ lines, bounded ─▶ stderr of the worker

A trainer writes to its file and never waits for a reader. Its lines have their own time and name, and pass as they are.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from io import RawIOBase
from pathlib import Path

from consumer.supervisor import trainer_process
from contracts.encoding.json_lines import open_plain
from onbeat.base.telemetry.logs import UNSHOWN, iso, shown

LOOK_S = 0.25
READ_BYTES = 256 * 1024
LINES_A_SECOND = 200
"""More are counted and left out: a library that repeats a warning for each token fills no log server."""
LINE_BYTES = 8192
"""The rest of a longer line is left out."""


class LogRelay(trainer_process.LogRelay):
    """Follows one file at a time: the worker's main thread begins and ends that, a thread of its own reads."""

    def __init__(self, *, log_format: str = "human") -> None:
        self._log_format = log_format
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, path: Path) -> None:
        """Follows what is appended to the file from now on; it may not be there yet."""
        start = path.stat().st_size if path.is_file() else 0
        self._ending = threading.Event()
        lines = _Lines(path, log_format=self._log_format)
        self._thread = threading.Thread(
            target=self._run, args=(path, start, lines, self._ending), name="trainer log", daemon=True
        )
        self._thread.start()

    def end(self, *, within_s: float = 1.0) -> None:
        """Passes on what the file holds, and leaves it; a stderr that is not read holds no worker."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(within_s)
            self._thread = None

    @staticmethod
    def _run(path: Path, start: int, lines: _Lines, ending: threading.Event) -> None:
        file = None
        while True:
            is_last = ending.wait(LOOK_S)
            file = file or _opened(path, start)
            if file and os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # it reached its bound, and was emptied
            while file and (data := file.read(READ_BYTES)):
                lines.take(data)
            if is_last:
                lines.close()
                if file:
                    file.close()
                return


class _Lines:
    """Bytes → lines on stderr."""

    def __init__(self, path: Path, *, log_format: str) -> None:
        self._path = path
        self._log_format = log_format
        self._part = b""
        """The beginning of a line."""
        self._since_s = time.monotonic()
        self._num_passed = self._num_left_out = 0

    def take(self, data: bytes) -> None:
        *whole, self._part = (self._part + data).split(b"\n")
        self._part = self._part[:LINE_BYTES]
        for line in whole:
            self._pass_on(line)

    def close(self) -> None:
        if self._part:
            self._pass_on(self._part)
        self._say_left_out()

    def _pass_on(self, line: bytes) -> None:
        if time.monotonic() - self._since_s >= 1.0:
            self._say_left_out()
            self._since_s, self._num_passed = time.monotonic(), 0
        self._num_passed += 1
        if self._num_passed > LINES_A_SECOND:
            self._num_left_out += 1
        else:
            _write(as_log_line(line[:LINE_BYTES].decode(errors="replace").rstrip("\r"), self._log_format))

    def _say_left_out(self) -> None:
        if self._num_left_out:
            _write(
                as_log_line(f"{self._num_left_out} lines are left out here, {self._path} has them", self._log_format)
            )
            self._num_left_out = 0


def as_log_line(line: str, log_format: str) -> str:
    """The line as it is, without what would move a cursor. Among lines of JSON each is an object: what a library wrote
    beside the trainer's log becomes the message of one."""
    if log_format == "json" and not line.startswith("{"):
        now_s = time.time()
        fields = {"at": iso(now_s), "level": "info", "message": line, "service": "trainer", "at_s": round(now_s, 3)}
        line = json.dumps(fields)
    if log_format == "json":
        return UNSHOWN.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
    return shown(line)


def _opened(path: Path, start: int) -> RawIOBase | None:
    """None while there is no such file. Code of a job's author may have made it a link, or a pipe."""
    try:
        file = open_plain(path).detach()
    except OSError:
        return None
    file.seek(start)
    return file


def _write(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
