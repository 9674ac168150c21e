"""Length: short enough."""

from __future__ import annotations

from contracts.rewards import LengthReward, RewardItem


def score(component: LengthReward, item: RewardItem) -> float:
    """1.0 up to `target_chars` characters (Unicode code points), then linear down to 0.0 at `max_chars`."""
    left = (component.max_chars - len(item.completion)) / (component.max_chars - component.target_chars)
    return min(1.0, max(0.0, left))
