"""The words by which a row is refused: its place, its column, and a cure that fits this fault.

reader ─▶ PlacedRow ─▶ Row (row.py), by the columns that the spec names ─▶ Example
                         └─ RowFault ─▶ refused()
"""

from __future__ import annotations

from contracts.errors import InvalidInput
from contracts.spec.datasets import RowColumns
from onbeat.data.prompts.file_rows import PlacedRow

LINE_CURE = 'write one JSON object a line: {"prompt": "...", "reference": "..."}'
MOST_COLUMNS_SHOWN = 12


class RowFault(ValueError):
    """A fault of one row, with the cure for it."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.cure = cure


def missing(name: str, columns: RowColumns, row: PlacedRow, *, instead: str = "") -> RowFault:
    """Returns the fault of a row that lacks a column which an example is made of.

    Args:
        name: Our key in `dataset.columns`.
        columns: What the columns are called in the file.
        row: The row, whose other columns the message shows.
        instead: Words for what may stand in its place.
    """
    column = getattr(columns, name)
    is_null = column in row.row
    problem = f"column `{column}` is null" if is_null else f"there is no column `{column}`{_shown_columns(row)}"
    return RowFault(problem, f"name the column by dataset.columns.{name}{instead}")


def missing_further(column: str, key: str, row: PlacedRow) -> RowFault:
    """Returns the fault of a row that lacks a column which another part of the spec names.

    Args:
        column: The column.
        key: The key of the spec that names it, or keys with "or" between them.
        row: The row, whose other columns the message shows.
    """
    return RowFault(
        f"there is no column `{column}`, which {key} names{_shown_columns(row)}", f"correct {key}, or add the column"
    )


def refused(fault: RowFault, *, origin: str, field: str) -> InvalidInput:
    """Returns the refusal of a row. origin: its file and place. field: of the spec, which leads to the file."""
    return InvalidInput(f"{origin}: {fault}", field=field, cure=fault.cure)


def _shown_columns(row: PlacedRow) -> str:
    names = [f"`{name[:80]}`" for name in row.columns[:MOST_COLUMNS_SHOWN]]
    more = ", …" if len(row.columns) > MOST_COLUMNS_SHOWN else ""
    return f" (there are {', '.join(names)}{more})" if names else ""
