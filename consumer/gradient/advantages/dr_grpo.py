"""Dr. GRPO's advantage (Liu et al., arXiv 2503.20783, section 3.2): A = r - mean of the group.

Without the deviation a prompt that is nearly always solved, or nearly never, weighs no more than another.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumer.gradient.advantages.group_relative import centred_rewards


def dr_grpo_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """rewards: [k, G]; answers [k, G]."""
    return centred_rewards(rewards)
