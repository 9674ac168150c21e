"""GRPO's advantage (Shao et al., arXiv 2402.03300, section 4.1.2): A = (r - mean) / (std + epsilon) of the group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumer.gradient.advantages.group_relative import centred_rewards


def grpo_advantages(rewards: NDArray[np.float64], *, epsilon: float) -> NDArray[np.float64]:
    """With the unbiased std. rewards: [k, G]; answers [k, G], in float64: the loss rounds once to its own dtype."""
    return centred_rewards(rewards) / (rewards.std(axis=1, ddof=1, keepdims=True) + epsilon)
