"""Reads files with a JSON object a line, line by line: memory holds one line, whatever size the file has."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contracts.errors import InvalidInput
from onbeat.data.datasets.reading.row_refusals import LINE_CURE
from onbeat.data.prompts.file_rows import MAX_ROW_BYTES, PlacedRow

OTHER_ENCODINGS = {
    # The mark of UTF-32-LE begins with that of UTF-16-LE, so it is looked for first.
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order mark → the encoding that a file begins with it in."""
BINARY_FILES = {
    b"PAR1": ("a parquet file", 'set dataset.type = "huggingface"'),
    b"ARROW1": ("an arrow file", 'set dataset.type = "huggingface"'),
    b"\x1f\x8b": ("compressed by gzip", "unpack it: gzip -d FILE.gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it: zstd -d FILE.zst"),
    b"BZh": ("compressed by bzip2", "unpack it: bzip2 -d FILE.bz2"),
    b"\xfd7zXZ\x00": ("compressed by xz", "unpack it: xz -d FILE.xz"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
}
"""How other files begin that people name here → (what they are, the cure)."""
LONGEST_MARK = 6

_raw_row = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_lines(path: Path, field: str, *, columns: Sequence[str]) -> Iterator[PlacedRow]:
    """Yields the rows of a file by the numbers of their lines, from 1; blank lines are left out.

    Only `columns` are decoded; the others are there as bytes, so that a message can name them. A UTF-8 byte order mark,
    which editors of Windows write and don't show, is skipped. Raises InvalidInput, OSError.
    """
    with path.open("rb") as file:
        start = file.read(LONGEST_MARK)
        check_beginning(start, path, field)
        file.seek(len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0)
        for number, line in enumerate(_bounded_lines(file.readline, path, field), start=1):
            if line.strip():
                yield _row(line, number, path, field, columns)


def check_beginning(start: bytes, path: Path, field: str) -> None:
    """Raises InvalidInput for a file that begins as no text in UTF-8 does. start: its first LONGEST_MARK bytes."""
    for mark, encoding in OTHER_ENCODINGS.items():
        if start.startswith(mark):
            raise InvalidInput(
                f"{path} is encoded in {encoding}",
                field=field,
                cure=f"save it as UTF-8: iconv -f {encoding} -t UTF-8 FILE > NEW",
            )
    for mark, (kind, cure) in BINARY_FILES.items():
        if start.startswith(mark):
            raise InvalidInput(f"{path} is {kind}, not a file of JSON lines", field=field, cure=cure)
    # Without a mark: a JSON line begins with an ASCII character, of which UTF-16 makes two bytes, one of them zero.
    if b"\x00" in start[:2]:
        raise InvalidInput(
            f"{path} is encoded in UTF-16, or is no text",
            field=field,
            cure="save it as UTF-8 with a JSON object a line",
        )


def _bounded_lines(readline: Callable[[int], bytes], path: Path, field: str) -> Iterator[bytes]:
    number = 0
    # One byte more than is allowed shows that the line goes on.
    while line := readline(MAX_ROW_BYTES + 1):
        number += 1
        if len(line) > MAX_ROW_BYTES:
            raise InvalidInput(
                f"{path}:{number} is longer than {MAX_ROW_BYTES:,} bytes",
                field=field,
                cure="write one row a line, and leave long columns out that nothing reads",
            )
        yield line


def _row(line: bytes, number: int, path: Path, field: str, columns: Sequence[str]) -> PlacedRow:
    try:
        row: dict[str, Any] = dict(_raw_row.decode(line))
        for name in columns:
            if name in row:
                row[name] = msgspec.json.decode(row[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem, cure = _line_problem(line, error)
        raise InvalidInput(f"{path}:{number}: {problem}", field=field, cure=cure) from error
    return PlacedRow(place=str(number), row=row, columns=tuple(row))


def _line_problem(line: bytes, error: Exception) -> tuple[str, str]:
    """(problem, cure) of a line that is no JSON object."""
    try:
        line.decode()
    except UnicodeDecodeError as fault:
        return (
            f"byte {fault.start + 1} of the line is no UTF-8",
            "save the file as UTF-8: iconv -f LATIN1 -t UTF-8 FILE > NEW",
        )
    if line.lstrip().startswith(b"["):
        return "the line is a list, not an object", "write its objects a line each: jq -c '.[]' FILE > NEW.jsonl"
    if isinstance(error, msgspec.ValidationError):
        return "the line is a JSON value, but no object", LINE_CURE
    return f"the line is no JSON: {str(error).removeprefix('JSON is malformed: ')}", LINE_CURE
