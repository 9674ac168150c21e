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
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from contracts.encoding.wire import UNREADABLE, Record, decoder_of, encode_json

MAX_PLAIN_BYTES = 512 * 1024 * 1024
"""The largest file that is one record and is read as a whole: an audit chain of a million iterations."""
MAX_LINE_BYTES = 1024 * 1024
"""The longest line of metrics, timeline or scores; more than any trainer writes."""
MAX_LIST_BYTES = 64 * 1024 * 1024
"""How much of a file becomes one list of records. As records it takes about three times as much memory."""


def read_plain(path: Path, *, max_bytes: int = MAX_PLAIN_BYTES) -> bytes:
    """Returns the bytes of a file. Raises OSError as `open_plain` does."""
    with open_plain(path, max_bytes=max_bytes) as file:
        return file.read(max_bytes)


def open_plain(path: Path, *, max_bytes: int | None = None) -> BufferedReader:
    """Opens a file for reading. Raises OSError for what is missing, no plain file, or over max_bytes."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    status = os.fstat(number)
    is_plain = stat.S_ISREG(status.st_mode)
    if is_plain and (max_bytes is None or status.st_size <= max_bytes):
        return file
    file.close()
    if is_plain:
        raise OSError(errno.EFBIG, f"is over {max_bytes} bytes", str(path))
    raise OSError(errno.EINVAL, "is no plain file", str(path))


T = TypeVar("T")

log = logging.getLogger(__name__)

TOO_LONG = b"{"
"""Stands in place of a line that is longer than any of ours; it does not decode."""


class PlacedLine(NamedTuple):
    """Where a line stands in its file."""

    start: int
    """Bytes before it."""
    num_bytes: int
    """Its length, with its line break."""


def json_lines(
    path: Path, kind: type[T], *, start: int = 0, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[tuple[PlacedLine, T]]:
    """Yields each record with its place, in the file's order; none where the file is missing.

    Memory holds one line, whatever size the file has: a longer one is passed over like one that does not decode.
    start: bytes before the first line that is read. Raises OSError, as `open_plain` does.
    """
    decoder_of(kind)
    decoder = msgspec.json.Decoder(kind)
    try:
        opened = open_plain(path)
    except FileNotFoundError:
        return
    with opened as file:
        file.seek(start)
        torn = ""
        for number, (place, line) in enumerate(_lines(file, start, max_line_bytes), start=1):
            if torn:
                # The last line isn't named: its writer may not have finished it.
                log.warning("%s", torn)
                torn = ""
            if not line.strip():
                continue
            try:
                yield place, decoder.decode(line)
            except UNREADABLE as error:
                torn = f"line {number} of {path} is left out, it does not decode: {error}"


def _lines(file: BufferedReader, start: int, max_line_bytes: int) -> Iterator[tuple[PlacedLine, bytes]]:
    """Yields each line; of one that is too long its first part, which decodes to nothing."""
    while line := file.readline(max_line_bytes):
        num_bytes = len(line)
        rest = line
        while not rest.endswith(b"\n") and len(rest) == max_line_bytes:
            rest = file.readline(max_line_bytes)
            num_bytes += len(rest)
        is_whole = num_bytes <= max_line_bytes
        yield PlacedLine(start, num_bytes), line if is_whole else TOO_LONG
        start += num_bytes


def json_line(file: BufferedReader, kind: type[T], place: PlacedLine) -> T | None:
    """Returns the record at a place that `json_lines` has named; None where it isn't there any more. Raises OSError."""
    decoder_of(kind)
    file.seek(place.start)
    try:
        return msgspec.json.decode(file.read(place.num_bytes), type=kind)
    except UNREADABLE:
        return None


def read_json_lines(
    path: Path, kind: type[T], *, max_bytes: int = MAX_LIST_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> list[T]:
    """Returns all records, in the file's order; [] where the file is missing. Raises OSError, as `open_plain` does.

    max_bytes: of a longer file the last so many bytes are read, and the log says so.
    """
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return []
    start = line_after(path, size - max_bytes)  # 0 for a file that is no longer
    if start:
        log.warning("%s has %d bytes, of which the last %d are read", path, size, size - start)
    return [record for _, record in json_lines(path, kind, start=start, max_line_bytes=max_line_bytes)]


def line_after(path: Path, place: int) -> int:
    """Returns where the first line begins that starts at or behind a place. Raises OSError."""
    if place <= 0:
        return 0
    with open_plain(path) as file:
        file.seek(place - 1)
        # From the byte before the place on: where it is a line break, the place itself begins a line.
        part = file.readline(MAX_LINE_BYTES)
        while part and not part.endswith(b"\n"):  # a part of a longer line; empty at the file's end
            part = file.readline(MAX_LINE_BYTES)
        return file.tell()


def last_json_lines(path: Path, kind: type[T], *, max_bytes: int) -> tuple[list[T], bool]:
    """Returns (the records in the file's last max_bytes, True where they are all that it has). Raises OSError."""
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
