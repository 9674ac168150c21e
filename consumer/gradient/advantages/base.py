"""What an advantage is made of: what a group knows, and what only the whole iteration knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
"""[k, G], a row for each group."""


@dataclass(frozen=True, kw_only=True)
class LateScale:
    """What is known when the iteration's last batch is in: an advantage is (A - baseline) / deviation."""

    baseline: float = 0.0
    deviation: float = 1.0


def no_late_scale(_advantages: Sequence[float], _epsilon: float) -> LateScale:
    """Returns the scale of an advantage that its group knows altogether."""
    return LateScale()


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """A member of the family. `ADVANTAGE_KINDS` of contracts/spec_tables/algorithm.py says what goes with it."""

    of_groups: Callable[[Rewards, float], Rewards]
    """(rewards, epsilon) → [k, G]; a group of equal rewards gives exactly 0.0 unless the baseline is late."""
    of_penalties: Callable[[Rewards], Rewards] | None = None
    """Penalties [k, G] → what is taken off the advantages, [k, G]; None: they are taken off the rewards."""
    late: Callable[[Sequence[float], float], LateScale] = no_late_scale
    """(`of_groups` of all completions of the iteration in any order, epsilon) → what is left to do."""
