"""JSON lines of a run folder: metrics, timeline, evaluations.

A writer that is killed, or that finds the disk full, leaves a torn line: the beginning of a record without its line
break. A reader leaves out each line that does not decode, and the log names it unless it is the last one, which its
writer may not have finished yet. The next writer begins a line of its own behind a torn one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from contracts.encoding.plain_files import open_plain, read_plain
from contracts.encoding.wire import UNREADABLE, Record, decoder_of, encode_json

T = TypeVar("T")
TAIL_BYTES = 64 * 1024
"""Far more than one line of metrics.jsonl."""

log = logging.getLogger(__name__)


def read_json_lines(path: Path, kind: type[T]) -> list[T]:
    """Returns all records, in the file's order; [] where the file is missing. Raises OSError, as `open_plain` does."""
    try:
        return _decoded(read_plain(path), kind, source=str(path))
    except FileNotFoundError:
        return []


def last_json_line(path: Path, kind: type[T]) -> T | None:
    """Returns the last whole record, without reading the file up to it; None where there is none. Raises OSError."""
    records, _ = last_json_lines(path, kind, max_bytes=TAIL_BYTES)
    return records[-1] if records else None


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
