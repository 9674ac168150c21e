"""The weighted sum of a rubric's scorers over one item, and which of them need a process of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from contracts.rewards import (
    Component,
    ExactReward,
    FormatReward,
    LengthReward,
    MathVerifyReward,
    NumericReward,
    OverlongReward,
    PluginReward,
    ReasoningGymReward,
    RegexReward,
    RewardComponent,
    RewardItem,
    Scored,
    Unscorable,
    UnscorableReason,
    breakdown_names,
)
from reward_service.scorers import exact, length, math_verify, numeric, overlong, plugin, reasoning_gym, regex
from reward_service.scorers import format as whole_format
from reward_service.scorers.refusals import BadReference, TooComplex, UnknownEntryPoint

SCORERS: dict[type[Component], Callable[[Any, RewardItem], float]] = {
    ExactReward: exact.score,
    NumericReward: numeric.score,
    RegexReward: regex.score,
    FormatReward: whole_format.score,
    LengthReward: length.score,
    OverlongReward: overlong.score,
    ReasoningGymReward: reasoning_gym.score,
    MathVerifyReward: math_verify.score,
    PluginReward: plugin.score,
}

WARM_UPS: dict[type[Component], Callable[[Any], None]] = {
    ReasoningGymReward: reasoning_gym.warm_up,
    MathVerifyReward: math_verify.warm_up,
    PluginReward: plugin.warm_up,
}

LINEAR_TIME = (ExactReward, NumericReward, LengthReward, OverlongReward)
"""Linear in the completion's length and free of foreign code: safe without a deadline, in the service's process."""

MAX_DETAIL_CHARS = 500


def needs_isolation(components: tuple[RewardComponent, ...]) -> bool:
    """True if any component may run away, crash, or run foreign code."""
    return not all(isinstance(component, LINEAR_TIME) for component in components)


def only_isolated_name(components: tuple[RewardComponent, ...]) -> str:
    """Breakdown name of the component that a lost process was busy with; "" where it may have been one of several."""
    names = [
        name
        for name, component in zip(breakdown_names(components), components, strict=True)
        if not isinstance(component, LINEAR_TIME)
    ]
    return names[0] if len(names) == 1 else ""


def warm_up_keys(components: tuple[RewardComponent, ...]) -> frozenset[str]:
    """What a process must have imported for a rubric: few values, so that a process can remember them all."""
    return frozenset(
        f"plugin {component.entry_point}" if isinstance(component, PluginReward) else component.name
        for component in components
        if type(component) in WARM_UPS
    )


def warm_up(components: tuple[RewardComponent, ...]) -> Unscorable | None:
    """Does the slow imports of a rubric once; the reason why no item can be scored, or None."""
    for name, component in zip(breakdown_names(components), components, strict=True):
        prepare = WARM_UPS.get(type(component))
        if prepare is None:
            continue
        try:
            prepare(component)
        except Exception as error:
            return _unscorable(name, error)
    return None


def score_item(components: tuple[RewardComponent, ...], item: RewardItem) -> Scored | Unscorable:
    """Sum of weight x score with the unweighted scores; the first component that fails decides (I6)."""
    breakdown: dict[str, float] = {}
    reward = 0.0
    for name, component in zip(breakdown_names(components), components, strict=True):
        try:
            value = SCORERS[type(component)](component, item)
        except Exception as error:
            return _unscorable(name, error)
        if not math.isfinite(value):
            return Unscorable(reason="not_finite", detail=f"the score is {value}", component=name)
        breakdown[name] = value
        reward += component.weight * value
    if not math.isfinite(reward):
        return Unscorable(reason="not_finite", detail=f"the weighted sum is {reward}")
    return Scored(reward=reward, breakdown=breakdown)


def _unscorable(component: str, error: Exception) -> Unscorable:
    """Any exception of foreign code has an answer here: the item is an error with a reason, never a number."""
    reason: UnscorableReason = "raised"
    detail = f"{type(error).__name__}: {error}"
    if isinstance(error, BadReference):
        reason, detail = "bad_reference", str(error)
    elif isinstance(error, TooComplex):
        reason, detail = "too_complex", str(error)
    elif isinstance(error, UnknownEntryPoint):
        reason, detail = "unknown_entry_point", str(error)
    encodable = detail.encode("utf-8", "backslashreplace").decode("utf-8")
    return Unscorable(reason=reason, detail=encodable[:MAX_DETAIL_CHARS], component=component)
