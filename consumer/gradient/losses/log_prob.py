"""Losses that are linear in log pi: CISPO and supervised fine-tuning.

CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the ratio is a clipped weight, and no token is dropped.

    L = 1/(sum_i |o_i|) sum_i sum_t -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A_i log pi(o_t)

sg stops the gradient. clip_low = 1 sets no lower bound, as the paper does.

Supervised fine-tuning: the cross-entropy of completions that the data set gives, a mean over the iteration's tokens.

    L = 1/(sum_i |o_i|) sum_i sum_t -log pi(o_t)

Prompts are context alone (Ouyang et al., arXiv 2203.02155, section 3.5; TRL's SFTTrainer with `completion_only_loss`).
"""

from __future__ import annotations

import torch

from consumer.gradient.losses.base import TOKEN_MEAN, LossInputs, PolicyLoss, PolicyTerm


def weighted_log_prob(inputs: LossInputs) -> PolicyTerm:
    """Computes REINFORCE's loss with a truncated importance weight for each token."""
    ratio = inputs.log_ratio().detach().exp()  # [R, T] rho; without gradient, it only weighs
    weight = inputs.clip(ratio)
    return PolicyTerm(
        # The objective is maximised, a loss is minimised: hence the sign.
        token_loss=-(weight * inputs.gain) * inputs.logprobs,
        # weight is ratio inside the clips, larger than it below them and smaller above.
        clipped_low=ratio < weight,
        clipped_high=ratio > weight,
    )


def cross_entropy(inputs: LossInputs) -> PolicyTerm:
    """Computes -log pi of each token, whatever its advantage."""
    nowhere = torch.zeros_like(inputs.loss_mask)
    return PolicyTerm(token_loss=-inputs.logprobs, clipped_low=nowhere, clipped_high=nowhere)


CISPO = PolicyLoss(surrogate=weighted_log_prob, normaliser=TOKEN_MEAN)
SFT = PolicyLoss(surrogate=cross_entropy, normaliser=TOKEN_MEAN)
