"""Regex: a pattern that must be found. May backtrack without end, but for the plainest: runs in the pool."""

from __future__ import annotations

import re

from contracts.rewards import RegexReward, RewardItem
from reward_service.scorers.last_tag import last_answer


def score(component: RegexReward, item: RewardItem) -> float:
    """1.0 if the pattern is found; with a group `answer`, if the last match's group equals the reference.

    The last match is a model's final answer; any match would reward listing candidates.
    """
    pattern = re.compile(component.pattern)
    if "answer" not in pattern.groupindex:
        return float(pattern.search(item.completion) is not None)
    answer = last_answer(component.pattern, item.completion)
    return float(answer is not None and answer.strip() == item.reference.strip())
