"""Regex: a pattern that must be found. May backtrack without end: runs in the pool."""

from __future__ import annotations

import re

from contracts.rewards import RegexReward, RewardItem


def score(component: RegexReward, item: RewardItem) -> float:
    """1.0 if the pattern is found; with a group `answer`, if the last match's group equals the reference.

    The last match is a model's final answer; any match would reward listing candidates.
    """
    pattern = re.compile(component.pattern)
    if "answer" not in pattern.groupindex:
        return float(pattern.search(item.completion) is not None)
    answer = last_answer(pattern, item.completion)
    return float(answer is not None and answer.strip() == item.reference.strip())


def last_answer(pattern: re.Pattern[str], text: str) -> str | None:
    """Group `answer` of the last match; None without a match, or where the group took no part in it."""
    answer: str | None = None
    for match in pattern.finditer(text):
        answer = match["answer"]
    return answer
