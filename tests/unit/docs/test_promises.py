"""Each promise of docs/promises.md has a meaning and a sign of its break, and its evidence on docs/evidence.md."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.docs.test_pages import anchor

DOCS = Path(__file__).parents[3] / "docs"
NUMBERS = [f"I{number}" for number in range(1, 12)]


def promises_of(page: str) -> dict[str, str]:
    """Returns the section of each promise on a page, by its heading."""
    sections = re.split(r"^## ", (DOCS / page).read_text(), flags=re.MULTILINE)
    return {text.split("\n", 1)[0]: text for text in sections if re.match(r"I\d+ · ", text)}


def test_each_promise_has_a_row_in_the_index_and_a_section_on_both_pages() -> None:
    headings = list(promises_of("promises.md"))
    assert [heading.split(" ")[0] for heading in headings] == NUMBERS
    assert list(promises_of("evidence.md")) == headings
    rows = re.findall(r"^\[(I\d+)\]\(#([\w-]+)\) \| ", (DOCS / "promises.md").read_text(), re.MULTILINE)
    assert rows == list(zip(NUMBERS, map(anchor, headings), strict=True))


def test_each_promise_says_how_a_break_would_show_and_leads_to_its_evidence() -> None:
    for heading, text in promises_of("promises.md").items():
        assert "*If it failed*" in text, heading
        assert f"[Evidence](evidence.md#{anchor(heading)})" in text, heading


def test_the_evidence_of_each_promise_is_places_in_code_and_tests() -> None:
    for heading, text in promises_of("evidence.md").items():
        assert re.search(r"^what keeps it \| where$", text, re.MULTILINE), heading
        assert re.search(r"^tests \| ", text, re.MULTILINE), heading
        assert len(re.findall(r"`tests/[\w/]+\.py`", text)) >= 3, heading
