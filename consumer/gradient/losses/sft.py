"""Supervised fine-tuning: the cross-entropy of completions that the data set gives, a mean over the iteration's tokens.

    L = 1/(sum_i |o_i|) sum_i sum_t -log pi(o_t)

Prompts are context alone (Ouyang et al., arXiv 2203.02155, section 3.5; TRL's SFTTrainer with `completion_only_loss`).
"""

from __future__ import annotations

import torch

from consumer.gradient.losses.base import TOKEN_MEAN, LossInputs, PolicyLoss, PolicyTerm


def cross_entropy(inputs: LossInputs) -> PolicyTerm:
    """Computes -log pi of each token, whatever its advantage."""
    nowhere = torch.zeros_like(inputs.loss_mask)
    return PolicyTerm(token_loss=-inputs.logprobs, clipped_low=nowhere, clipped_high=nowhere)


SFT = PolicyLoss(surrogate=cross_entropy, normaliser=TOKEN_MEAN)
