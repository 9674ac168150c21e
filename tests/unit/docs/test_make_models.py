"""docs/models.md is that of the last run over all families, which was one of the pinned transformers."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make_models import PAGE, models_page
from tests.families import ALL_FAMILIES
from tests.family_runs import COLUMNS, Cell, Results, Row, read_results

ROOT = Path(__file__).parents[3]


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == models_page(read_results()), "python -m docs.make_models > docs/models.md"


def test_the_results_are_of_each_family_and_column_and_of_the_pinned_packages() -> None:
    """A new release of a package is a changed pin, and a new run."""
    results = read_results()
    assert [row.family for row in results.rows] == list(ALL_FAMILIES)
    assert all(list(row.cells) == list(COLUMNS) for row in results.rows)
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: number.partition("+")[0] for name, number in results.versions.items()} == {
        name: pins[name] for name in results.versions
    }


def test_a_refusal_has_its_cure() -> None:
    refusals = [cell.text for row in read_results().rows for cell in row.cells.values() if cell.result == "refused"]
    assert refusals
    assert all(text.endswith(")") for text in refusals)


def test_families_with_sliding_windows_share_steps() -> None:
    decoding = {row.family: row.cells["samples"].text for row in read_results().rows}
    families = ("mistral", "olmo3", "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma3")
    assert {decoding[family] for family in families} == {"batches share steps"}


def test_a_text_stands_once_with_all_its_families() -> None:
    cells = dict.fromkeys(COLUMNS, Cell(result="yes"))
    fault = cells | {"exports": Cell(result="no", text="RuntimeError: a `broken` *thing*")}
    rows = [Row(family=name, architecture="Some", cells=fault) for name in ("one", "other")]
    page = models_page(Results(date="2026-01-01", commit="ab", versions={"torch": "1"}, rows=rows))
    assert page.count("RuntimeError") == 1
    assert "- `one`, `other`: ✘ `RuntimeError: a 'broken' *thing*`" in page
    assert "`one` | `Some` | ✔ | ✔ | ✔ | ✔ | ✔ | ✘" in page
