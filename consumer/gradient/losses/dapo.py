"""DAPO's loss (Yu et al., arXiv 2503.14476, equations 8 and 12): clip-higher, and the token mean of the iteration.

    L = 1/(sum_i |o_i|) sum_i sum_t -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i),   clip_low < clip_high

The token count is that of the whole iteration, not of a micro-batch. Dynamic sampling and overlong shaping, the
paper's two other parts, belong to sampling and to rewards (`overlong`).
"""

from __future__ import annotations

from consumer.gradient.losses.base import PolicyLoss
from consumer.gradient.losses.grpo import clipped_surrogate
from consumer.gradient.losses.normalisers import TOKEN_MEAN

DAPO = PolicyLoss(surrogate=clipped_surrogate, normaliser=TOKEN_MEAN)
