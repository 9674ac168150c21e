"""Rows of the table of experience as arrays and texts: what a stage gets, and what an external trainer trains.

A row is one rollout: sample r % G of prompt r // G of its batch. A column has a value for each row:

    rows["text"]                 list of str                    a text column
    rows["completion_ids"]       list of int32[T] arrays        a column along the tokens, T differs from row to row
    rows["sampled"]              list of int32[T] arrays        1 where the model sampled, 0 where an environment spoke
    rows["generator_logprobs"]   list of float32[S] arrays      a column along the sampled tokens: S = sampled.sum()
    rows["reward"]               float64[n] array               a column with one number a rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET

from contracts.errors import ContractViolation, NotFound
from contracts.experience.columns import Column, ColumnType

DTYPES: Mapping[ColumnType, str] = {"float32": "<f4", "float64": "<f8", "int32": "<i4"}

Values = Sequence[str] | Sequence[np.ndarray] | np.ndarray
"""The values of some rows in one column."""


@dataclass(frozen=True, kw_only=True)
class RowKey:
    """The place of a row: its rollout, among those of the job."""

    iteration: int
    batch_id: str
    row: int
    """Its number in the batch: row // G is its prompt there."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Rows:
    """Rows with their columns, which are named by `columns`. The arrays are read-only."""

    keys_of_rows: tuple[RowKey, ...]
    columns: Mapping[str, Column] = field(repr=False)
    values_as_bytes: Mapping[str, Sequence[bytes]] = field(repr=False)
    """Column → a value for each row, as on the wire."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns:
            raise NotFound(
                f"these rows have no column {name}", field="column", cure=f"they have {', '.join(self.columns)}"
            )
        return unpacked(self.columns[name], self.values_as_bytes[name])

    __iter__ = None
    """A row is no thing of its own; columns are."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.keys_of_rows)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self)} rows of {', '.join(sorted(self.batch_ids))}: {', '.join(self.columns)})"
        )

    @property
    def batch_ids(self) -> frozenset[str]:
        return frozenset(key.batch_id for key in self.keys_of_rows)


def unpacked(column: Column, values: Sequence[bytes]) -> Values:
    """Bytes of some rows → arrays or texts."""
    if column.type == "text":
        return [value.decode() for value in values]
    dtype = DTYPES[column.type]
    if column.per == "rollout":
        return np.frombuffer(b"".join(values), dtype=dtype)
    shape = (-1,) if column.width is UNSET else (-1, column.width)
    return [np.frombuffer(value, dtype=dtype).reshape(shape) for value in values]


def packed(column: Column, values: Sequence[Any] | np.ndarray, *, of: str) -> list[bytes]:
    """Numbers, arrays or texts of some rows → bytes. Raises ContractViolation that names column and row.

    of: what brings them, for the error. How long the arrays have to be is the broker's to check.
    """
    if isinstance(values, str | bytes) or not hasattr(values, "__len__"):
        raise _wrong(column, of, f"is a {type(values).__name__}, where a list with one value a row is needed")
    return [_packed_value(column, value, f"row {row}", of) for row, value in enumerate(values)]


def _packed_value(column: Column, value: Any, row: str, of: str) -> bytes:
    if column.type == "text":
        if not isinstance(value, str):
            raise _wrong(column, of, f"{row} is a {type(value).__name__}, not a text")
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise _wrong(column, of, f"{row} is no text that can be sent: {error.reason}") from error
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise _wrong(column, of, f"{row} is no array: {error}") from error
    dtype = np.dtype(DTYPES[column.type])
    num_axes = (column.per != "rollout") + (column.width is not UNSET)
    if array.ndim != num_axes or array.shape[1:] not in ((), (column.width,)):
        numbers = "one value" if column.width is UNSET else f"{column.width} values"
        raise _wrong(
            column, of, f"{row} has shape {list(array.shape)}, it needs {num_axes} axes: {numbers} a {column.per}"
        )
    fits = np.can_cast(array.dtype, dtype, casting="same_kind") and array.dtype != bool
    if array.size and not fits:
        raise _wrong(column, of, f"{row} is {array.dtype}, the column is {column.type}")
    with np.errstate(over="ignore"):
        values = array.astype(dtype)
    if dtype.kind == "i" and not np.array_equal(values, array):
        raise _wrong(column, of, f"{row} has numbers outside {column.type}")
    if dtype.kind == "f" and not np.isfinite(values).all():
        raise _wrong(column, of, f"{row} has a number that is not finite")
    return values.tobytes()


def _wrong(column: Column, of: str, problem: str) -> ContractViolation:
    return ContractViolation(f"column {column.name}: {problem}", field=of)
