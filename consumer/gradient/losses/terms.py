"""What a spec adds to a surrogate, per token: the KL from the reference, that from a teacher, and the weight
against the policy that sampled.

The estimators are those of Schulman 2020, "Approximating KL Divergence".
p = log pi and q = log pi_ref of a token that pi sampled. In the reward k1 is the unbiased one. As a loss term an
estimator is differentiated, and what its gradient is of in expectation is another thing than what it estimates (Tang
and Munos, arXiv 2506.09477). By hand, with E over what pi samples and g = grad log pi, whose mean is 0:

    E[grad k1] = E[g] = 0
    E[grad k2] = E[(p - q) g] = grad KL(pi || pi_ref)
    E[grad k3] = E[g - e^(q - p) g] = -E_ref[g] = grad KL(pi_ref || pi)

Weighed by the policy ratio, whose own gradient is rho g (`estimate_weight`), each has that of KL(pi || pi_ref),
whichever policy sampled, if rho is against that one:

    grad (rho k1) = rho (p - q + 1) g,    grad (rho k3) = grad (sg(rho) k2) = rho (p - q) g
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k1 = p - q: unbiased, of either sign. [R, T] → [R, T]; differentiable in logprobs, like the others."""
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k2 = (p - q)^2 / 2: biased, never negative."""
    return (logprobs - reference_logprobs).square() / 2.0


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k3 = e^(q - p) - (q - p) - 1: unbiased and never negative."""
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1.0


ESTIMATORS: dict[Literal["k1", "k2", "k3"], Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def estimate_weight(log_ratio: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Returns the weight [R, T] of an estimate of KL(pi || pi_ref) with which its gradient is that divergence's:
    DeepSeek-AI, arXiv 2512.02556, section 3.1, for k3.

    log_ratio: [R, T] log rho, whose gradient the weight has (`LossInputs.log_ratio`).
    """
    ratio = log_ratio.exp()
    # k2's own gradient is the divergence's; the ratio's would add rho k2 g to it.
    return ratio.detach() if estimator == "k2" else ratio


def reverse_kl(log_ratio: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """On-policy distillation: the reverse KL to a teacher at each token that the student sampled, [R, T] each.

        l = rho sg(log pi(o_t) - log pi_teacher(o_t)),  rho = pi(o_t) / pi_old(o_t)

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation": the student samples, the teacher judges every token,
    and no token is charged with what the ones after it cost (a discount of 0). In the first update pi is pi_old and
    this is their advantage, log pi_teacher - log pi_old, as a policy gradient. Its mean over pi_old's samples has the
    gradient of KL(pi || pi_teacher) at each prefix, also where pi has left pi_old: the score is that of pi as it is
    now, not of pi_old. So it is 0 where the student gives a token the teacher's probability, a step can't be pulled
    past it, and no clip is needed; the advantage of PPO, which is fixed while pi moves, needs one.

    log_ratio: log rho, whose gradient it has (`LossInputs.log_ratio`).
    """
    return log_ratio.exp() * (logprobs.detach() - teacher_logprobs)


def correction_weights(
    logprobs: Tensor,
    generator_logprobs: Tensor,
    *,
    loss_mask: Tensor,
    kind: Literal["tis", "icepop", "decoupled_ppo"],
    level: Literal["token", "sequence", "geometric"],
    low: float,
    high: float,
) -> tuple[Tensor, Tensor]:
    """Returns weights [R, T] in the dtype of logprobs, without gradient, and bool [R, T], True where a bound acted.

    With k = pi_prox(o_t) / mu(o_t), where pi_prox is the trainer's probability before the iteration's first step and mu
    the generator's as it sampled, with the same version or, under a lag, an older one:

        tis            min(k, high)                      Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
                                                         You Off-Policy RL Training"; truncation as in arXiv 1802.01561
        icepop         k where low <= k <= high, else 0  Ling Team, arXiv 2510.18855, section 2.3
        decoupled_ppo  k where k <= high, else 0         AReaL (Fu et al., arXiv 2505.24298, equation 5); the cap is of
                                                         its code

    At the level of a sequence k is the product over the response's tokens, one weight for all of them. At the geometric
    one k is the |o|-th root of that, so that its bounds don't depend on the length, and chooses alone: all inside the
    bounds weigh 1, the others 0. It is the rejection of verl's `rollout_rs = "geometric"`, for a root is no importance
    weight: it corrects neither a token nor the response.
    Log-probs are [R, T]; padding weighs 1.0 but in a response that is left out. low is IcePop's alone, and 0.0 for the
    others.
    """
    # log k in float64: a sequence adds up thousands of them before the exponential.
    log_ratio = (logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    if level != "token":
        of_response = log_ratio.sum(dim=1, keepdim=True)
        if level == "geometric":
            of_response = of_response / loss_mask.sum(dim=1, keepdim=True)
        log_ratio = of_response.expand_as(log_ratio)
    ratio = log_ratio.exp()
    if level == "geometric":
        is_outside = (ratio < low) | (ratio > high)
        return torch.where(is_outside, 0.0, 1.0).to(logprobs.dtype), is_outside
    if kind == "tis":
        return ratio.clamp(max=high).to(logprobs.dtype), ratio > high
    outside = (ratio < low) | (ratio > high)
    return torch.where(outside, 0.0, ratio).to(logprobs.dtype), outside


def far_responses(logprobs: Tensor, generator_logprobs: Tensor, *, loss_mask: Tensor, threshold: float) -> Tensor:
    """Returns bool [R]: responses whose mean of log(mu / pi) over their tokens is above the threshold.

    DeepSeek-AI, arXiv 2512.02556, section 3.1: of those, the ones of negative advantage are left out. Log-probs [R, T].
    """
    gaps = (generator_logprobs.double() - logprobs.detach().double()).masked_fill(~loss_mask, 0.0)
    return gaps.sum(dim=1) / loss_mask.sum(dim=1) > threshold
