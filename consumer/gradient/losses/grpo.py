"""GRPO, outcome supervision (Shao et al., DeepSeekMath, arXiv 2402.03300, equation 3).

L = 1/N sum_i 1/|o_i| sum_t -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i)
rho = exp(log pi(o_t) - log pi_old(o_t))
"""

from __future__ import annotations

import torch

from consumer.gradient.losses.base import LossInputs, PolicyLoss, PolicyTerm
from consumer.gradient.losses.normalisers import RESPONSE_MEAN


def clipped_surrogate(inputs: LossInputs) -> PolicyTerm:
    """PPO's pessimistic bound for each token (Schulman et al., arXiv 1707.06347, equation 7)."""
    ratio = inputs.log_ratio().exp()
    gain = inputs.advantages.unsqueeze(1)
    clipped = inputs.clip(ratio)
    return PolicyTerm(
        token_loss=-torch.minimum(ratio * gain, clipped * gain),
        # The bound is pessimistic: a good token's ratio is held down, a bad one's up, and never the other way round.
        clipped_low=(ratio < clipped) & (gain < 0.0),
        clipped_high=(ratio > clipped) & (gain > 0.0),
    )


GRPO = PolicyLoss(surrogate=clipped_surrogate, normaliser=RESPONSE_MEAN)
