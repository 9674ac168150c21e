"""A prompt that is made of several columns, by `dataset.prompt_template`.

    "Question: {question}\nAnswer:" and {"question": "1+1"} ─▶ "Question: 1+1\nAnswer:"

Texts are put in as they are, all at once: a brace in a row stays a brace, and nothing of a row is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec import UNSET

from onbeat.data.datasets.reading.row_refusals import RowFault, missing_further
from onbeat.data.prompts.file_rows import PlacedRow, value_at

KEY = "dataset.prompt_template"
PLACE = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
"""A brace that is written twice, or a column in braces."""


def columns_of_template(template: str) -> list[str]:
    """Returns the columns that a template names; `a.b` is `b` of the table in column `a`."""
    return [place[1] for place in PLACE.finditer(template) if place[1]]


def filled_template(template: str, row: PlacedRow) -> str:
    """Returns the prompt of a row. Raises RowFault for a column that it lacks, or that has no text and no number."""
    return PLACE.sub(lambda place: _text_at(place[1], row) if place[1] else place[0][0], template)


def _text_at(column: str, row: PlacedRow) -> str:
    value: Any = value_at(row.row, column)
    if value is UNSET:
        raise missing_further(column, KEY, row)
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        raise RowFault(f"column `{column}` has a table", f"name a column of it: {{{column}.NAME}} in {KEY}")
    raise RowFault(f"column `{column}` has no text and no number", f"name another column in {KEY}")
