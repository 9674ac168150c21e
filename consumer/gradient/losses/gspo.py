"""GSPO (Zheng et al., arXiv 2507.18071, equations 5 to 7): one ratio for the whole response.

    L = 1/N sum_i -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    s_i = exp(1/|o_i| sum_t log rho_t)

s_i is a geometric mean, so its clip range is some hundred times narrower than that of a token's ratio.

Where each turn has an advantage of its own it is the paper's GSPO-token (section 4.3): the ratio stays the response's,
and each token weighs it by its own advantage.

    L = 1/N sum_i 1/|o_i| sum_t -min(s_it A_it, clip(s_it, 1 - clip_low, 1 + clip_high) A_it)
    s_it = sg(s_i) rho_t / sg(rho_t)
"""

from __future__ import annotations

from consumer.gradient.losses.base import RESPONSE_MEAN, LossInputs, PolicyLoss, PolicyTerm
from consumer.gradient.losses.grpo import pessimistic


def sequence_surrogate(inputs: LossInputs) -> PolicyTerm:
    """Puts the response's loss on each of its tokens, so that their mean is the loss."""
    log_ratio = inputs.log_ratio()  # [R, T]; 0.0 on padding, which leaves the sum alone
    ratio = (log_ratio.sum(dim=1) / inputs.loss_mask.sum(dim=1)).exp()  # [R] s_i
    if inputs.advantages.dim() == 2:
        # GSPO-token: all ratios [R, T] are their response's, each with the gradient of its token.
        return pessimistic(inputs, ratio.detach().unsqueeze(1) * (log_ratio - log_ratio.detach()).exp())
    term = pessimistic(inputs, ratio.unsqueeze(1))  # [R, 1], of which each token has the whole
    return PolicyTerm(
        token_loss=term.token_loss.expand_as(log_ratio),
        clipped_low=term.clipped_low.expand_as(log_ratio),
        clipped_high=term.clipped_high.expand_as(log_ratio),
    )


GSPO = PolicyLoss(surrogate=sequence_surrogate, normaliser=RESPONSE_MEAN)
