"""Files of a run folder, opened as no more than what they should be, and its JSON lines: metrics, timeline, scores.

Code of a job's author writes into the run folder: what has a file's name there may be a link to any file of this host,
a pipe that never ends, or a file that claims to be larger than any memory. A gateway or a consumer that reads it would
hang, or die, for all jobs.

A writer that is killed, or that finds the disk full, leaves a torn line: the beginning of a record without its line
break. A reader leaves out each line that does not decode, and the log names it unless it is the last one, which its
writer may not have finished yet. The next writer begins a line of its own behind a torn one.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterable
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from contracts.encoding.wire import UNREADABLE, Record, decoder_of, encode_json

MAX_BYTES = 512 * 1024 * 1024
"""The largest file that is read as a whole: far more than a million iterations write."""


def read_plain(path: Path) -> bytes:
    """Returns what a file holds. Raises OSError as `open_plain` does."""
    with open_plain(path, max_bytes=MAX_BYTES) as file:
        return file.read(MAX_BYTES)


def open_plain(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Opens a file for reading. Raises OSError for what is missing, no plain file, or over max_bytes."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    found = os.fstat(number)
    if stat.S_ISREG(found.st_mode) and (max_bytes is None or found.st_size <= max_bytes):
        return file
    file.close()
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"is over {max_bytes} bytes", str(path))
    raise OSError(errno.EINVAL, "is no plain file", str(path))


T = TypeVar("T")

log = logging.getLogger(__name__)


def read_json_lines(path: Path, kind: type[T]) -> list[T]:
    """Returns all records, in the file's order; [] where the file is missing. Raises OSError, as `open_plain` does."""
    try:
        return _decoded(read_plain(path), kind, source=str(path))
    except FileNotFoundError:
        return []


def last_json_lines(path: Path, kind: type[T], *, max_bytes: int) -> tuple[list[T], bool]:
    """(the records in the file's last bytes, whether they are all that it has). Raises OSError."""
    try:
        opened = open_plain(path)
    except FileNotFoundError:
        return [], True
    with opened as file:
        start = max(0, file.seek(0, 2) - max_bytes)
        file.seek(start)
        if start:
            file.readline()
        return _decoded(file.read(max_bytes), kind, source=f"the end of {path}"), not start


def append_json_lines(path: Path, records: Iterable[Record]) -> None:
    """Writes each record as a line of its own, behind a torn line too. Raises OSError."""
    with path.open("ab+") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
        is_torn = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * is_torn + b"".join(encode_json(record) + b"\n" for record in records))


def _decoded(data: bytes, kind: type[T], *, source: str) -> list[T]:
    decoder_of(kind)
    decoder = msgspec.json.Decoder(kind)
    try:
        return decoder.decode_lines(data)
    except UNREADABLE:
        pass  # one line by one, to find those that are torn
    records: list[T] = []
    lines = data.rstrip().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            records.extend(decoder.decode_lines(line))
        except UNREADABLE as error:
            if number < len(lines):
                log.warning("line %d of %s is left out, it does not decode: %s", number, source, error)
    return records
