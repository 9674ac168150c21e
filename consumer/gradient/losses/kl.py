"""Estimators of the KL divergence from the reference, per token (Schulman 2020, "Approximating KL Divergence").

p = log pi and q = log pi_ref of a token that pi sampled. As a loss term an estimator is differentiated: k2 then
has the gradient of the true divergence in expectation, k3 one that is biased, k1 one of expectation zero
(Tang and Munos, arXiv 2506.09477). In the reward k1 is the unbiased one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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
