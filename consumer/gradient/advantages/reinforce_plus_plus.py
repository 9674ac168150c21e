"""REINFORCE++ (Hu et al., arXiv 2501.03262), in both of its forms; mean and std are those of the whole iteration.

    reinforce++            A_i = (r_i - mean) / (std + epsilon)
    reinforce++_baseline   A_i = r'_i / (std + epsilon),  r'_i = r_i - mean of its group: for several samples a prompt

Both are known when the last batch is in. Every loss of the family is linear in a positive scale of the advantages, so
a micro-batch trains on r', and the iteration's gradient is divided by the deviation once, at the end; the mean of r' is
0. Where no clip acts a loss is linear in the advantages altogether: then the gradients of r and of 1 are summed apart,
and the mean times the second is taken off the first (I7).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.loop.sampled import unbiased_std


@dataclass(frozen=True, kw_only=True)
class LateScale:
    """What is known when the iteration's last batch is in: an advantage is (A - baseline) / deviation."""

    baseline: float = 0.0
    deviation: float = 1.0


def centred_scale(centred: Sequence[float], _earned: Sequence[float], epsilon: float) -> LateScale:
    """Divides by std + epsilon, with the unbiased std; centred: every r', in any order. Their mean is 0."""
    return LateScale(deviation=math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1)) + epsilon)


def earned_scale(_: Sequence[float], earned: Sequence[float], epsilon: float) -> LateScale:
    """Divides by std + epsilon, the unbiased std of what was earned."""
    return LateScale(deviation=unbiased_std(earned) + epsilon)


def mean_and_scale(rewards: Sequence[float], _earned: Sequence[float], epsilon: float) -> LateScale:
    """Subtracts the mean and divides by std + epsilon, those of the iteration's rewards, less penalties, in any order.

    Equal rewards have an infinite scale: a rounded mean would leave a residue that a division by epsilon magnifies.
    """
    mean = math.fsum(rewards) / len(rewards)
    if min(rewards) == max(rewards):
        return LateScale(baseline=mean, deviation=math.inf)
    return LateScale(baseline=mean, deviation=unbiased_std(rewards) + epsilon)
