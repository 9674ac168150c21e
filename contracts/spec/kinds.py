"""Properties of losses, advantages and corrections that a spec's rules read; consumer/gradient has the equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, kw_only=True)
class LossKind:
    """A loss."""

    clip_range: tuple[float, float] = (0.2, 0.2)
    """(clip_low, clip_high) where a spec leaves them out; sources in docs/losses.md."""
    has_token_ratios: bool = True
    """True: each token has a policy ratio of its own. False: all tokens of a response have the response's."""
    is_unbounded_above: bool = True
    """True: the clips let the ratio of a token with a negative advantage grow, which clip_max then bounds."""
    learns_given: bool = False
    """True: the loss learns completions that the data set gives, and none is sampled for training."""


LOSS_KINDS = {
    "grpo": LossKind(),
    "dr_grpo": LossKind(),
    "dapo": LossKind(clip_range=(0.2, 0.28)),
    "bnpo": LossKind(),
    "gspo": LossKind(clip_range=(3e-4, 4e-4), has_token_ratios=False),
    "cispo": LossKind(clip_range=(1.0, 4.0), is_unbounded_above=False),
    "sft": LossKind(is_unbounded_above=False, learns_given=True),
}
"""The losses that a spec may name; `LOSSES` of consumer/gradient/losses/family.py has their functions."""
LossName: TypeAlias = Literal[tuple(LOSS_KINDS)]  # pyright: ignore[reportInvalidTypeForm]  # msgspec reads it when it runs


@dataclass(frozen=True, kw_only=True)
class AdvantageKind:
    """An advantage."""

    uses_epsilon: bool = False
    """True: it divides by a standard deviation, to which advantage_epsilon is added."""
    is_scaled_late: bool = False
    """True: that is the deviation over the whole iteration."""
    normalises_components: bool = False
    """True: it compares the components of a reward each by itself."""
    compares_groups: bool = True
    """True: it compares a reward with those of its group, which then needs two or more."""
    has_critic: bool = False
    """True: a critic that is trained next to the policy estimates the value of each token."""


ADVANTAGE_KINDS = {
    "grpo": AdvantageKind(uses_epsilon=True),
    "dr_grpo": AdvantageKind(),
    "rloo": AdvantageKind(),
    "gdpo": AdvantageKind(uses_epsilon=True, is_scaled_late=True, normalises_components=True),
    "lite_ppo": AdvantageKind(uses_epsilon=True, is_scaled_late=True),
    "reinforce++_baseline": AdvantageKind(uses_epsilon=True, is_scaled_late=True),
    "gae": AdvantageKind(compares_groups=False, has_critic=True),
    "none": AdvantageKind(compares_groups=False),
}
"""The advantages that a spec may name; their functions: `ADVANTAGES` of consumer/gradient/advantages/estimators.py."""
AdvantageName: TypeAlias = Literal[tuple(ADVANTAGE_KINDS)]  # pyright: ignore[reportInvalidTypeForm]

CORRECTION_RANGES = {"none": (0.0, 0.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0), "decoupled_ppo": (0.0, 5.0)}
"""Correction → (low, high) where a spec leaves them out."""
CorrectionName: TypeAlias = Literal["none", "tis", "icepop", "decoupled_ppo"]
