"""Estimators of the KL divergence from the reference, per token."""

from __future__ import annotations

from torch import Tensor


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 = e^(q - p) - (q - p) - 1 with p = log pi, q = log pi_ref: unbiased and never negative (Schulman 2020).

    [R, T] in, [R, T] out; differentiable in logprobs.
    """
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1.0
