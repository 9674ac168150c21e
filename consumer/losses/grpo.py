"""GRPO, outcome supervision (Shao et al., DeepSeekMath, arXiv 2402.03300, equation 3).

    L = sum_i 1/|o_i| sum_t [ -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i) + kl_coefficient k3 ]
    rho = exp(log pi(o_t) - log pi_old(o_t))

The sum over responses is left undivided: the iteration divides once by its number of responses, so that the order
in which batches arrive cannot matter (I7).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from consumer.losses.kl import k3


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """Loss of one micro-batch, and what is logged of it."""

    loss_sum: Tensor
    """Scalar with gradient: the sum over responses of the per-response mean."""
    num_clipped: int
    """Tokens whose rho is outside [1 - clip_low, 1 + clip_high]."""
    k3_sum: float
    """Sum of k3 over tokens; 0.0 without a reference."""


def grpo_loss(
    logprobs: Tensor,
    *,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_low: float,
    clip_high: float,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> GrpoLoss:
    """logprobs, loss_mask and the optional log-probs are [R, T], advantages [R]; padding may hold any finite value.

    old_logprobs defaults to the detached logprobs: strictly on-policy, one step per iteration, rho is 1.0 and the
    gradient is that of A log pi.
    """
    on_policy = old_logprobs is None
    ratio = (logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)).exp()
    gain = advantages.unsqueeze(1)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = -torch.minimum(ratio * gain, clipped * gain)
    k3_sum = 0.0
    if reference_logprobs is not None:
        divergence = k3(logprobs, reference_logprobs)
        token_loss = token_loss + kl_coefficient * divergence
        k3_sum = float(divergence.detach()[loss_mask].double().sum())
    per_response = token_loss.masked_fill(~loss_mask, 0.0).sum(dim=1) / loss_mask.sum(dim=1)
    num_clipped = 0 if on_policy else int(((ratio != clipped) & loss_mask).sum())
    return GrpoLoss(loss_sum=per_response.sum(), num_clipped=num_clipped, k3_sum=k3_sum)
