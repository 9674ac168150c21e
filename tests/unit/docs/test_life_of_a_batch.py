"""docs/life-of-a-batch.md shows lines of the code as they stand there."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "life-of-a-batch.md"
EXCERPT = re.compile(r"^```(?:python|lua) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = "…"
EXCERPTS = EXCERPT.findall(PAGE.read_text())
"""(path, lines of it) of each fenced block."""


def dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def test_every_block_of_the_page_names_its_file() -> None:
    assert PAGE.read_text().count("```") == 2 * len(EXCERPTS)


@pytest.mark.parametrize(("path", "shown"), EXCERPTS, ids=[path for path, _ in EXCERPTS])
def test_an_excerpt_stands_in_the_file_that_it_names(path: str, shown: str) -> None:
    """In this order, and between two places where lines are left out without a gap."""
    code, start = (ROOT / path).read_text().splitlines(), 0
    runs = itertools.groupby(shown.splitlines(), lambda line: line.strip() == LEFT_OUT)
    for run in [list(lines) for is_gap, lines in runs if not is_gap]:
        places = range(start, len(code) - len(run) + 1)
        place = next((at for at in places if dedented(code[at : at + len(run)]) == dedented(run)), None)
        assert place is not None, f"{path} has not, or not here: {run}"
        start = place + len(run)
