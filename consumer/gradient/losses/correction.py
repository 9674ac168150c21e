"""Computes weights against the policy that sampled, detached.

With k = pi_prox(o_t) / mu(o_t), where pi_prox is the trainer's probability before the iteration's first step and mu the
generator's as it sampled, with the same version or, under a lag, an older one:

    tis            min(k, high)                      Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
                                                     Off-Policy RL Training"; truncation as in arXiv 1802.01561
    icepop         k where low <= k <= high, else 0  Ling Team, arXiv 2510.18855, section 2.3
    decoupled_ppo  k where k <= high, else 0         AReaL (Fu et al., arXiv 2505.24298, equation 5); the cap is of its
                                                     code

At the level of a sequence k is the product over the response's tokens, one weight for all of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def correction_weights(
    logprobs: Tensor,
    generator_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    kind: Literal["tis", "icepop", "decoupled_ppo"],
    level: Literal["token", "sequence"],
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Returns weights [R, T] in the dtype of logprobs, without gradient, and bool [R, T], True where a bound acted.

    Log-probs are [R, T]; padding weighs 1.0. low is IcePop's alone, and 0.0 for the others.
    """
    # log k in float64: a sequence adds up thousands of them before the exponential.
    log_ratio = (logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.exp()
    if kind == "tis":
        return ratio.clamp(max=high).to(logprobs.dtype), ratio > high
    outside = (ratio < low) | (ratio > high)
    return torch.where(outside, 0.0, ratio).to(logprobs.dtype), outside
