"""A reward is looked up among installed packages as a loss and a data set are: one package offers it, or none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.rewards import PluginReward, RewardItem, Unscorable
from reward_service.scorers.rubric import score_component, score_groups
from tests.builders import install

ITEM = RewardItem(prompt="", completion="", reference="", task_entry="")


def test_a_reward_that_two_packages_offer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("brevity", "rival"):
        install(tmp_path, package, "[onbeat.rewards]\nclaimed_twice = math:prod\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refusal = score_component("both", PluginReward(entry_point="claimed_twice"), ITEM)
    assert isinstance(refusal, Unscorable)
    assert refusal.reason == "unknown_entry_point"
    assert "several packages offer `claimed_twice` in group onbeat.rewards: brevity 1.0, rival 1.0" in refusal.detail


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("(completion, group_size)", "can't be called: it needs `group_size`"),
        ("(references)", "can't be called: it needs `references`"),
        ("(completions):\n    return 1.0\n", "names `completions`, so it returns a list of floats: 'float' object"),
        ("(completions):\n    return ['1']\n", "returned str, not a number"),
        ("(completions):\n    return [1.0]\n", "`reward` returned 1 scores for 2 completions"),
    ],
)
def test_a_function_for_whole_groups_that_takes_or_gives_something_else_is_told(source: str, problem: str) -> None:
    text = f"def reward{source}" if ":" in source else f"def reward{source}:\n    return [0.0, 0.0]\n"
    refusal = score_groups(PluginReward(entry_point="reward", file="mine.py", source=text), [ITEM, ITEM], 2)
    assert isinstance(refusal, Unscorable)
    assert problem in refusal.detail
