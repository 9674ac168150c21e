"""Rewards of a spec: what they compare with a reference, what they state, and which items a request asks for."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.rewards import (
    ExactReward,
    FormatReward,
    LengthReward,
    PluginReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    RewardRequest,
    reads_references,
    stated_score,
    stated_scores,
)

ITEM = RewardItem(prompt="1+1=", completion="2", reference="2")


@pytest.mark.parametrize(
    ("component", "is_read"),
    [
        (ExactReward(), True),
        (LengthReward(target_chars=1, max_chars=2), False),
        (FormatReward(pattern="2"), False),
        (RegexReward(pattern=r"(\d+)"), False),
        (RegexReward(pattern=r"(?P<answer>\d+)"), True),
        (PluginReward(entry_point="brief"), True),
        (PluginReward(entry_point="brief", arguments=("completion",)), False),
        (PluginReward(entry_point="right", arguments=("completion", "reference")), True),
        (PluginReward(entry_point="right", arguments=("completions", "references")), True),
    ],
)
def test_a_reference_is_read_by_what_compares_with_it(component: RewardComponent, is_read: bool) -> None:
    assert reads_references((component,)) is is_read
    assert reads_references((LengthReward(target_chars=1, max_chars=2), component)) is is_read


@pytest.mark.parametrize(
    ("pattern", "compares"),
    [
        ("(?P<answer>x)", True),
        ("a(?P<answer>x)", True),
        (r"\(?P<answer>x)", False),
        ("[(?P<answer>]x", False),
        ("[](?P<answer>]x", False),
        ("[^](?P<answer>]x", False),
        ("[a](?P<answer>x)", True),
        ("(?P<result>x)", False),
    ],
)
def test_a_pattern_compares_where_it_has_a_group_of_that_name(pattern: str, compares: bool) -> None:
    assert RegexReward(pattern=pattern).compares is compares


def test_a_score_is_stated_by_a_number_alone() -> None:
    assert stated_score("fail") is None
    assert stated_score(0.0) == 0.0
    assert stated_scores((ExactReward(), ExactReward(on_unscorable=-1.0))) == {"exact_2": -1.0}


@pytest.mark.parametrize(("options", "places"), [({}, (0, 1, 2)), ({"to_score": (2, 0)}, (2, 0))])
def test_a_request_asks_for_all_items_unless_it_names_some(options: dict[str, Any], places: tuple[int, ...]) -> None:
    assert RewardRequest(components=(ExactReward(),), items=(ITEM,) * 3, **options).places == places
