"""Rows of parquet, arrow and CSV files, decoded by a process of its own (table_process.py), whose memory has a bound.

file ─▶ table_process.py ─ parts of a MiB ─▶ pipe ─▶ rows
          └─ refused by the kernel, or killed: the file is refused by its field
"""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import msgspec

from contracts.encoding.wire import Record, decode
from contracts.errors import InvalidInput
from contracts.settings import PREFIX
from onbeat.base.process.launcher import LAUNCHER_PID, with_own_packages
from onbeat.data.prompts.file_rows import MAX_ROW_BYTES, PlacedRow

PROCESS = "onbeat.data.prompts.table_process"
"""It is run, and not imported: from its first import on it changes how its process ends."""
PART_BYTES = 2**20
"""A part is sent as soon as it is so long: at most this and one row."""
LENGTH = struct.Struct(">I")
SMALLER = "write it again with smaller row groups, pages and rows, or as a file of JSON lines"
PART_TIMEOUT_S = 300.0
"""Longest wait for the next part: the start of the process, and a MiB of rows."""
MAX_PART_BYTES = PART_BYTES + 2 * MAX_ROW_BYTES
"""A part has at most PART_BYTES, one row more, and what frames them."""
NOT_INSTALLED = 'pip install "onbeat[huggingface]"'


class TablePart(Record, frozen=True, kw_only=True):
    """Some rows of a file, in its order."""

    columns: tuple[str, ...] = ()
    """Names of all columns of the file; in the first part alone."""
    rows: tuple[msgspec.Raw, ...] = ()
    """Each a map by column, of those that are read and there."""
    problem: str = ""
    """Says why the file isn't read on; "" where it is, or where all of it was read."""
    cure: str = ""


def read_table(path: Path, field: str, *, columns: Sequence[str] | None = None) -> Generator[PlacedRow]:
    """Yields the rows of a file by their numbers, from 0. Raises InvalidInput that names the field.

    columns: those that are read; None reads all.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidInput(f"{path} is read by pyarrow, which is not installed", field=field, cure=NOT_INSTALLED)
    process = subprocess.Popen(
        [sys.executable, "-m", PROCESS, str(path), json.dumps(columns)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
    )
    try:
        yield from _rows(process, path, field)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _environment() -> dict[str, str]:
    """This process's variables without settings: the decoder needs no key and no address."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    # The thread pools of numeric libraries would take a part of the bound, and do nothing.
    others |= {LAUNCHER_PID: str(os.getpid()), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return with_own_packages(others)


def _rows(process: subprocess.Popen[bytes], path: Path, field: str) -> Iterator[PlacedRow]:
    names: tuple[str, ...] = ()
    number = 0
    while (part := _next_part(process, path, field)) is not None:
        names = names or part.columns
        for data in part.rows:
            yield PlacedRow(place=str(number), row=msgspec.msgpack.decode(data), columns=names)
            number += 1
        if part.problem:
            raise InvalidInput(f"{path} {part.problem}, after {number} rows", field=field, cure=part.cure)
    code = process.wait(PART_TIMEOUT_S)
    if code or not names:
        end = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise InvalidInput(
            f"{path} can't be decoded: the process that reads it {end}, after {number} rows", field=field, cure=SMALLER
        )


def _next_part(process: subprocess.Popen[bytes], path: Path, field: str) -> TablePart | None:
    """None at the end of the stream."""
    deadline_s = time.monotonic() + PART_TIMEOUT_S
    head = _received(process, LENGTH.size, deadline_s, path, field)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MAX_PART_BYTES:
        raise InvalidInput(f"{path} has a row that is too long", field=field, cure=SMALLER)
    data = _received(process, length, deadline_s, path, field)
    return decode(data, TablePart) if len(data) == length else None


def _received(process: subprocess.Popen[bytes], length: int, deadline_s: float, path: Path, field: str) -> bytes:
    """Returns so many bytes; fewer where the stream ended. Raises InvalidInput past the deadline."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    data = bytearray()
    with selectors.DefaultSelector() as pipe:
        pipe.register(descriptor, selectors.EVENT_READ)
        while len(data) < length:
            if not pipe.select(max(0.0, deadline_s - time.monotonic())):
                raise InvalidInput(
                    f"{path} is not decoded: no row for {PART_TIMEOUT_S:.0f} s", field=field, cure=SMALLER
                )
            chunk = os.read(descriptor, min(length - len(data), 2**16))
            if not chunk:
                break
            data += chunk
    return bytes(data)
