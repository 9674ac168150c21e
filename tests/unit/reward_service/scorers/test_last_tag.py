"""The linear search for a model's last tag finds what `re` finds, also where `re` would not end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.rewards import ReasoningGymReward
from reward_service.scorers.last_tag import SHAPE, last_answer

PATTERNS = [
    ReasoningGymReward().answer_pattern,
    r"<answer>(?P<answer>.*?)</answer>",
    r"(?s)<answer>(?P<answer>.*?)</answer>",
    r"(?s)<answer>\s*(?P<answer>.*?)\s*</answer>",
    r"<answer>\s*(?P<answer>.*?)</answer>",
]
PIECES = st.sampled_from(["<answer>", "</answer>", "<answer", "answer>", "\n", " ", "\t", "\u00a0", "4", "x", "<", ">"])


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=300)
@given(pieces=st.lists(PIECES, max_size=14))
def test_the_last_answer_is_the_one_that_re_finds(pattern: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    answers = [match["answer"] for match in re.finditer(pattern, text)]
    assert last_answer(pattern, text) == (answers[-1] if answers else None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_line_breaks_after_a_tag_take_no_longer_than_other_text(pattern: str) -> None:
    assert SHAPE.fullmatch(pattern)
    breaks = "\n" * 200_000  # quadratic or cubic time for re, which would not end here
    assert last_answer(pattern, f"<answer>{breaks}x") is None
    assert last_answer(pattern, f"<answer>1</answer>{breaks}<answer>4</answer>{breaks}") == "4"
