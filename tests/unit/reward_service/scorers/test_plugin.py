"""A reward is looked up among installed packages as a loss and a data set are: one package offers it, or none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.rewards import PluginReward, RewardItem, Unscorable
from reward_service.scorers.rubric import score_component

ITEM = RewardItem(prompt="", completion="", reference="", task_entry="")


def install(folder: Path, package: str) -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onbeat.rewards]\nclaimed_twice = math:prod\n")


def test_a_reward_that_two_packages_offer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "brevity")
    install(tmp_path, "rival")
    monkeypatch.syspath_prepend(str(tmp_path))
    refusal = score_component("both", PluginReward(entry_point="claimed_twice"), ITEM)
    assert isinstance(refusal, Unscorable)
    assert refusal.reason == "unknown_entry_point"
    assert "several packages offer `claimed_twice` in group onbeat.rewards: brevity 1.0, rival 1.0" in refusal.detail
