"""GRPO and the losses that only divide it otherwise: one clipped surrogate, four normalisers.

    L = Z sum_i w_i sum_t -min(rho A_i, clip(rho, 1 - clip_low, 1 + clip_high) A_i),  rho = pi(o_t) / pi_old(o_t)

    grpo      Z = 1/N            w_i = 1/|o_i|            Shao et al., DeepSeekMath, arXiv 2402.03300, equation 3
    dr_grpo   Z = 1/N            w_i = 1/max_tokens       Liu et al., arXiv 2503.20783, section 3.2
    dapo      Z = 1/sum_i |o_i|  w_i = 1                  Yu et al., arXiv 2503.14476, equations 8 and 12
    bnpo      Z = 1/B            w_i = 1/sum_{j in b} |o_j|, with b the rollout batch of i

|o_i| counts what the model sampled: of a trajectory the tokens of its turns, without observations. max_tokens is the
most that a job samples in one completion (`JobSpec.max_sampled_tokens`).

dr_grpo takes GRPO's 1/|o_i| away, which makes long wrong answers cheap: the constant budget stands in its place. The
paper drops the deviation of the advantages, too: that is `algorithm.advantage = "dr_grpo"`.

dapo's token count is that of the whole iteration, not of a micro-batch, and its clip_high is above its clip_low. The
paper's two other parts, dynamic sampling and overlong shaping, belong to sampling and to rewards (`overlong`).

bnpo is what TRL's GRPOTrainer calls so: the result depends on `rollout.prompts_per_batch`, and on nothing that is
decided while the job runs. The name comes from Xiao et al., arXiv 2506.02864, whose beta-normalised advantages are not
here.

GSPO (Zheng et al., arXiv 2507.18071, equations 5 to 7): one ratio for the whole response.

    L = 1/N sum_i -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i = exp(1/|o_i| sum_t log rho_t)

s_i is a geometric mean, so its clip range is some hundred times narrower than that of a token's ratio.

Where each turn has an advantage of its own it is the paper's GSPO-token (section 4.3): the ratio stays the response's,
and each token weighs it by its own advantage.

    L = 1/N sum_i 1/|o_i| sum_t -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)
    s_it = sg(s_i) rho_t / sg(rho_t)
"""

from __future__ import annotations

import torch
from torch import Tensor

from consumer.gradient.losses import base


def clipped_surrogate(inputs: base.LossInputs) -> base.PolicyTerm:
    """Takes PPO's pessimistic bound for each token (Schulman et al., arXiv 1707.06347, equation 7)."""
    return pessimistic(inputs, inputs.log_ratio().exp())  # [R, T] rho; 1.0 on padding


def pessimistic(inputs: base.LossInputs, ratio: Tensor) -> base.PolicyTerm:
    """Bounds ratios [R, T], or [R, 1] of whole responses; the term has their shape."""
    gain = inputs.gain
    clipped_low, clipped_high = inputs.clips(ratio, gain)
    return base.PolicyTerm(
        # The objective is maximised, a loss is minimised: hence the sign.
        token_loss=-torch.minimum(inputs.bounded(ratio) * gain, inputs.clip(ratio) * gain),
        clipped_low=clipped_low,
        clipped_high=clipped_high,
    )


def sequence_surrogate(inputs: base.LossInputs) -> base.PolicyTerm:
    """Puts the response's loss on each of its tokens, so that their mean is the loss."""
    log_ratio = inputs.log_ratio()  # [R, T]; 0.0 on padding, which leaves the sum alone
    ratio = (log_ratio.sum(dim=1) / inputs.loss_mask.sum(dim=1)).exp()  # [R] s_i
    if inputs.advantages.dim() == 2:
        # GSPO-token: all ratios [R, T] are their response's, each with the gradient of its token.
        return pessimistic(inputs, ratio.detach().unsqueeze(1) * (log_ratio - log_ratio.detach()).exp())
    term = pessimistic(inputs, ratio.unsqueeze(1))  # [R, 1], of which each token has the whole
    return base.PolicyTerm(
        token_loss=term.token_loss.expand_as(log_ratio),
        clipped_low=term.clipped_low.expand_as(log_ratio),
        clipped_high=term.clipped_high.expand_as(log_ratio),
    )


GRPO = base.PolicyLoss(surrogate=clipped_surrogate, normaliser=base.RESPONSE_MEAN)
DR_GRPO = base.PolicyLoss(surrogate=clipped_surrogate, normaliser=base.CONSTANT)
DAPO = base.PolicyLoss(surrogate=clipped_surrogate, normaliser=base.TOKEN_MEAN)
BNPO = base.PolicyLoss(surrogate=clipped_surrogate, normaliser=base.BATCH_TOKEN_MEAN)
GSPO = base.PolicyLoss(surrogate=sequence_surrogate, normaliser=base.RESPONSE_MEAN)
