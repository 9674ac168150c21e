"""docs/life-of-a-batch.md shows lines of the code as they stand there, and few of them."""

from __future__ import annotations

import difflib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "life-of-a-batch.md"
LEFT_OUT = "…"
STEP = re.compile(r"^\*\*(\d+) · ", re.MULTILINE)
INVARIANT = re.compile(r"\(I[1-9]\)")
MAX_PAGE_LINES, MAX_CODE_LINES = 160, 75
LEAST_OF_STEP, MOST_OF_STEP = 4, 9
SHOWN = {
    "broker/scripts/claim_prompt.lua",
    "broker/scripts/commit_iteration.lua",
    "broker/scripts/open_iteration.lua",
    "broker/scripts/publish_batch.lua",
    "onbeat/loop/trained_job.py",
    "onbeat/loop/gathering.py",
    "onbeat/loop/expected.py",
    "producer/generator.py",
    "producer/rollout/carrier.py",
}
"""A batch's way through the fence, and what calls it on either side."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring lines of one file."""

    at: int
    """Number of the first one on the page."""
    lines: list[str]


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    path: str
    runs: list[Run]

    @property
    def num_lines(self) -> int:
        return sum(len(run.lines) for run in self.runs)


def excerpts(page: str) -> list[Excerpt]:
    """The fenced blocks, each of which names its language and its file."""
    found: list[Excerpt] = []
    in_block = is_new_run = False
    for number, line in enumerate(page.splitlines(), start=1):
        if line.startswith("```"):
            if not in_block:
                assert re.fullmatch(r"```(?:python \S+\.py|lua \S+\.lua)", line), f"{PAGE.name}:{number}: {line}"
                found.append(Excerpt(path=line.split()[1], runs=[]))
            in_block = not in_block
            is_new_run = True
        elif in_block and line.strip() == LEFT_OUT:
            is_new_run = True
        elif in_block:
            if is_new_run:
                found[-1].runs.append(Run(at=number, lines=[]))
            found[-1].runs[-1].lines.append(line)
            is_new_run = False
    return found


def dedented(lines: list[str]) -> list[str]:
    return textwrap.dedent("\n".join(lines)).split("\n")


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def check(excerpt: Excerpt, code: str) -> None:
    """Raises AssertionError, which names both lines, unless the runs stand in the file in this order, each of them
    whole, and with one indentation removed from all of them."""
    lines, start, removed = code.splitlines(), 0, set[int]()
    for run in excerpt.runs:
        size, shown = len(run.lines), dedented(run.lines)
        places = range(start, len(lines) - size + 1)
        place = next((at for at in places if dedented(lines[at : at + size]) == shown), None)
        assert place is not None, difference(run, lines, places, path=excerpt.path)
        removed.add(indent(lines[place]) - indent(run.lines[0]))
        assert len(removed) == 1, f"{PAGE.name}:{run.at}: {excerpt.path}:{place + 1} is indented otherwise"
        start = place + size


def difference(run: Run, lines: list[str], places: range, *, path: str) -> str:
    """The first line that differs where most of the run still stands."""

    def likeness(at: int) -> float:
        pairs = zip(run.lines, lines[at : at + len(run.lines)], strict=True)
        return sum(difflib.SequenceMatcher(None, one.strip(), other.strip()).ratio() for one, other in pairs)

    if not places:
        return f"{PAGE.name}:{run.at}: {path} has no more lines for: {run.lines[0].strip()}"
    at = max(places, key=likeness)
    found = dedented(lines[at : at + len(run.lines)])
    offset = next(n for n, (one, other) in enumerate(zip(dedented(run.lines), found, strict=True)) if one != other)
    shown, stands = run.lines[offset].strip(), lines[at + offset].strip()
    return f"{PAGE.name}:{run.at + offset} shows `{shown}`, {path}:{at + offset + 1} has `{stands}`"


@pytest.mark.parametrize("excerpt", excerpts(PAGE.read_text()), ids=lambda excerpt: excerpt.path)
def test_an_excerpt_stands_in_the_file_that_it_names(excerpt: Excerpt) -> None:
    check(excerpt, (ROOT / excerpt.path).read_text())


def test_the_page_follows_a_batch_through_the_fence_in_few_lines() -> None:
    page = PAGE.read_text()
    found = excerpts(page)
    assert {excerpt.path for excerpt in found} >= SHOWN
    assert sum(excerpt.num_lines for excerpt in found) <= MAX_CODE_LINES
    assert len(page.splitlines()) <= MAX_PAGE_LINES


def test_each_step_names_an_invariant_and_a_crash_and_shows_a_few_lines() -> None:
    _, *parts = STEP.split(PAGE.read_text())
    steps = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    assert list(steps) == list(range(1, len(steps) + 1))
    for number, text in steps.items():
        assert INVARIANT.search(text), number
        assert "crash" in text or "dies" in text, number
        shown = sum(excerpt.num_lines for excerpt in excerpts(text))
        assert LEAST_OF_STEP <= shown <= MOST_OF_STEP, (number, shown)


CODE = "def take(self):\n    if known:\n        return False\n    count(1)\n    count(2)\n"


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("if known:\n    return False\n…\ncount(2)", ""),
        ("if known:\n    return True", ":3 shows `return True`, a/b.py:3 has `return False`"),
        ("if known:\ncount(1)", ":3 shows `count(1)`"),
        ("count(2)\n…\nif known:", ":4: a/b.py has no more lines"),
        ("    if known:\n…\ncount(2)", ":4: a/b.py:5 is indented otherwise"),
    ],
)
def test_a_line_that_differs_is_named_on_the_page_and_in_the_file(shown: str, said: str) -> None:
    (excerpt,) = excerpts(f"```python a/b.py\n{shown}\n```\n")
    if not said:
        check(excerpt, CODE)
        return
    with pytest.raises(AssertionError, match=re.escape(f"{PAGE.name}{said}")):
        check(excerpt, CODE)
