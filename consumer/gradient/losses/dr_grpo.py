"""Dr. GRPO's loss (Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2).

    L = 1/N sum_i 1/max_new_tokens sum_t -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i)

GRPO without 1/|o_i|, which makes long wrong answers cheap: the constant budget takes its place. The paper drops the
deviation of the advantages, too: that is `algorithm.advantage = "dr_grpo"`.
"""

from __future__ import annotations

from consumer.gradient.losses.base import PolicyLoss
from consumer.gradient.losses.grpo import clipped_surrogate
from consumer.gradient.losses.normalisers import CONSTANT

DR_GRPO = PolicyLoss(surrogate=clipped_surrogate, normaliser=CONSTANT)
