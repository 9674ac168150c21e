"""REINFORCE++ with baseline (Hu et al., arXiv 2501.03262): the form that the paper gives for several samples a prompt.

    r'_i = r_i - mean of its group         A_i = r'_i / (std + epsilon),  std over all r' of the iteration

The mean of r' over the iteration is 0. The deviation is known when the last batch is in; every loss of the family is
linear in a positive scale of the advantages, so a micro-batch trains on r', and the iteration's gradient is divided
by the deviation once, at the end (I7).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from consumer.advantages.groups import centred_rewards


def undivided_advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r'. rewards: [k, G]; answers [k, G]."""
    return centred_rewards(rewards)


def iteration_scale(square_sums: Iterable[float], *, num_completions: int, epsilon: float) -> float:
    """The divisor std + epsilon, with the unbiased std; square_sums: of each batch's r', in any order."""
    return math.sqrt(math.fsum(square_sums) / (num_completions - 1)) + epsilon
