"""Format: the whole completion has a shape. May backtrack without end: runs in the pool."""

from __future__ import annotations

import re

from contracts.rewards import FormatReward, RewardItem


def score(component: FormatReward, item: RewardItem) -> float:
    """1.0 if the whole completion matches; `.` matches line breaks."""
    return float(re.fullmatch(component.pattern, item.completion, re.DOTALL) is not None)
