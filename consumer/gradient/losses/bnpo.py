"""The loss that TRL's GRPOTrainer calls `bnpo`: the token mean of each batch by itself, then the mean over batches.

    L = 1/B sum_b 1/(sum_{i in b} |o_i|) sum_{i in b} sum_t -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i)

b is a rollout batch, so the result depends on `rollout.prompts_per_batch`, and on nothing that is decided while the
job runs. The name comes from BNPO (Xiao et al., arXiv 2506.02864), whose beta-normalised advantages are not here.
"""

from __future__ import annotations

from consumer.gradient.losses.base import PolicyLoss
from consumer.gradient.losses.grpo import clipped_surrogate
from consumer.gradient.losses.normalisers import BATCH_TOKEN_MEAN

BNPO = PolicyLoss(surrogate=clipped_surrogate, normaliser=BATCH_TOKEN_MEAN)
