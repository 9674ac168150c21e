"""Where an answer stands, and what equals a reference: as scorers read it."""

from __future__ import annotations

import pytest

from contracts.rewards import NumericReward, RewardItem
from onbeat.environments.adapters.answers import READERS, are_equal
from reward_service.scorers.texts import numeric


@pytest.mark.parametrize(
    ("text", "reference", "is_right"),
    [
        ("It is 1,234.50", "1234.5", True),
        ("so 42%", "0.42", True),
        ("x = 1/3", "1/3", True),
        ("$5", "5", True),
        ("about 7", "8", False),
        ("1/0", "1", False),
    ],
)
def test_an_environment_and_a_reward_read_the_same_number(text: str, reference: str, is_right: bool) -> None:
    answer = READERS["number"](text)
    assert (answer is not None and are_equal(answer, reference)) == is_right
    item = RewardItem(prompt="", completion=text, reference=reference)
    assert bool(numeric(NumericReward(tolerance=0.0), item)) == is_right


def test_an_answer_is_read_from_its_last_tag_and_a_text_equals_itself() -> None:
    assert READERS["tag"]("<answer>a</answer> or <answer> b </answer>") == "b"
    assert READERS["tag"]("b</answer>") is READERS["number"]("none") is None
    assert are_equal(" Paris ", "Paris")
    assert not are_equal("Paris", "paris")
