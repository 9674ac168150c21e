"""RLOO (Ahmadian et al., arXiv 2402.14740): against the mean of the group's other samples.

A_i = r_i - 1/(G - 1) sum_{j != i} r_j = G/(G - 1) (r_i - mean)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumer.gradient.advantages.group_relative import centred_rewards


def rloo_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """rewards: [k, G]; answers [k, G]. Unbiased: the baseline does not contain the reward that it is taken off."""
    size = rewards.shape[1]
    return centred_rewards(rewards) * (size / (size - 1))
