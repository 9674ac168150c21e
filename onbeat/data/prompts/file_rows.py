"""A row of a data set's file, and how much memory all rows of a job may take, counted while they are read.

A small file may hold any number of rows: a parquet file of 16 KiB repeats one value a million times, and zstd packs a
gigabyte of spaces into a hundred kilobytes. So neither the size of a file nor what it says of itself bounds a data set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import UNSET

from contracts.errors import InvalidInput

ROW_BYTES = 1024
"""Memory of a row beside its texts: the objects that hold it, and its place in both sets."""
MAX_ROW_BYTES = 16 * 2**20
"""Longest row of a file: more than a million tokens of text."""


class PlacedRow(NamedTuple):
    """A row of a file, as each reader yields it."""

    place: str
    """Number of its line or row."""
    row: Mapping[str, Any]
    columns: Sequence[str]
    """Names of all columns that the row has, those that nothing reads among them."""


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Returns what stands in a column, UNSET where it isn't there; `a.b` leads into the table in `a`."""
    if column in row:
        return row[column]
    first, _, rest = column.partition(".")
    inner = row.get(first)
    return value_at(inner, rest) if rest and isinstance(inner, Mapping) else UNSET


class DatasetRoom:
    """The room of one job, which all of its data files share; `take` is called for each row before the next is read."""

    def __init__(self, max_mb: int) -> None:
        """max_mb: MiB, the setting ONBEAT_DATASET_MB."""
        self._max_mb = max_mb
        self._num_rows = 0
        self._text_bytes = 0

    def take(self, text_bytes: int, *, origin: str, field: str) -> None:
        """Counts one row. Raises InvalidInput for the row that has no room left.

        text_bytes: the UTF-8 length of all texts that are kept of the row. origin: file and row, for the message.
        """
        self._num_rows += 1
        self._text_bytes += text_bytes
        if self._num_rows * ROW_BYTES + self._text_bytes > self._max_mb * 2**20:
            raise InvalidInput(
                f"the job's data sets take more than {self._max_mb:,} MiB at {origin}: {self._num_rows:,} rows with "
                f"{self._text_bytes:,} bytes of text so far, and {ROW_BYTES:,} bytes for each row",
                field=field,
                cure="use a part of the rows, or let the operator raise ONBEAT_DATASET_MB where the trainer runs",
            )
