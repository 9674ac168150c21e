"""Exact: equal to the reference."""

from __future__ import annotations

from contracts.rewards import ExactReward, RewardItem


def score(component: ExactReward, item: RewardItem) -> float:
    """1.0 if both texts are equal without the white space around them; `ignore_case` folds case by Unicode."""
    completion, reference = item.completion.strip(), item.reference.strip()
    if component.ignore_case:
        completion, reference = completion.casefold(), reference.casefold()
    return float(completion == reference)
