"""A row of a data set's file, as each reader yields it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class PlacedRow(NamedTuple):
    """A row of a file."""

    place: str
    """Number of its line or row."""
    row: Mapping[str, Any]
    columns: Sequence[str]
    """Names of all columns that the row has, those that nothing reads among them."""
