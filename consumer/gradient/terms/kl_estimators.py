"""Estimates of KL(pi || q) from the tokens that pi sampled: Schulman 2020, "Approximating KL Divergence".

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

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k1 = p - q: unbiased, of either sign. [R, T] → [R, T]; differentiable in logprobs, like the others."""
    # p - q: above 0 where the policy gives the token more than the reference does.
    return logprobs - reference_logprobs


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k2 = (p - q)^2 / 2: biased, never negative."""
    return (logprobs - reference_logprobs).square() / 2.0


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Computes k3 = e^(q - p) - (q - p) - 1: unbiased and never negative."""
    # q - p: over the policy's samples the mean of e^(q - p) is 1, and that of e^(p - q) is not.
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1.0


ESTIMATORS: dict[Estimator, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def k3_sum(logprobs: Tensor, other_logprobs: Tensor, loss_mask: Tensor) -> float:
    """Sums k3 over the sampled tokens, in float64 and without gradient. Log-probs [R, T], loss_mask bool [R, T]."""
    return float(k3(logprobs.detach(), other_logprobs)[loss_mask].double().sum())


def estimate_weight(log_ratio: Tensor, estimator: Estimator) -> Tensor:
    """Returns the weight [R, T] of an estimate of KL(pi || pi_ref) with which its gradient is that divergence's:
    DeepSeek-AI, arXiv 2512.02556, section 3.1, for k3.

    log_ratio: [R, T] log rho, whose gradient the weight has (`TermInputs.log_ratio`).
    """
    ratio = log_ratio.exp()
    if estimator == "k2":
        # k2's own gradient is the divergence's; the ratio's would add rho k2 g to it.
        return ratio.detach()
    return ratio
