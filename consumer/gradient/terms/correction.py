"""The weight of each sample against the policy that sampled it: `algorithm.correction`.

It multiplies the sum of the terms that are means over samples (`LossTerm.is_weighed`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from contracts.spec.algorithm import AlgorithmSpec


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The weights of one pass. `pass_loss` creates it; terms read `is_bounded`, and the weights multiply their sum."""

    weights: Tensor | None
    """[R, T] without gradient; None where the job has no correction."""
    is_bounded: Tensor
    """bool [R, T]; True where a bound changed the weight."""

    @classmethod
    def of(
        cls,
        algorithm: AlgorithmSpec,
        *,
        prox_logprobs: Tensor,
        generator_logprobs: Tensor,
        loss_mask: Tensor,
    ) -> Correction:
        """Computes the weights that a job asks for.

        Args:
            algorithm: The job's.
            prox_logprobs: [R, T] of the policy before the iteration's first step.
            generator_logprobs: [R, T] as the tokens were sampled.
            loss_mask: bool [R, T].
        """
        if algorithm.correction_name == "none":
            return cls(weights=None, is_bounded=torch.zeros_like(loss_mask))
        # Bounds of k itself, not of its logarithm.
        low, high = algorithm.correction_range
        weights, is_bounded = correction_weights(
            prox_logprobs,
            generator_logprobs,
            loss_mask=loss_mask,
            kind=algorithm.correction_name,
            level=algorithm.correction_level,
            low=low,
            high=high,
        )
        return cls(weights=weights, is_bounded=is_bounded)

    def weigh(self, token_loss: Tensor) -> Tensor:
        """Returns the weighed loss, [R, T]."""
        if self.weights is None:
            return token_loss
        # Weights have no gradient: they scale a sample's loss, and are nothing to be trained.
        return token_loss * self.weights


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
    """Computes the weights of one pass from log k, k = pi_prox(o_t) / mu(o_t).

    pi_prox is the trainer's probability before the iteration's first step, mu the generator's as it sampled, with the
    same version or, under a lag, an older one:

        tis            min(k, high)                      Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
                                                         You Off-Policy RL Training"; truncation as in arXiv 1802.01561
        icepop         k where low <= k <= high, else 0  Ling Team, arXiv 2510.18855, section 2.3
        decoupled_ppo  k where k <= high, else 0         AReaL (Fu et al., arXiv 2505.24298, equation 5); the cap is of
                                                         its code

    At the level of a sequence k is the product over the response's tokens, one weight for all of them. At the geometric
    one k is the |o|-th root of that, so that its bounds don't depend on the length, and chooses alone: all inside the
    bounds weigh 1, the others 0. It is the rejection of verl's `rollout_rs = "geometric"`, for a root is no importance
    weight: it corrects neither a token nor the response.

    Args:
        logprobs: [R, T] log pi_prox.
        generator_logprobs: [R, T] log mu.
        loss_mask: bool [R, T]; one True or more in each row.
        kind: The correction.
        level: What a weight is of.
        low: The lower bound, which only IcePop and the geometric level have; 0.0 for the others.
        high: The upper bound.

    Returns:
        Weights [R, T] in the dtype of logprobs, without gradient, and bool [R, T], True where a bound acted. Padding
        weighs 1.0, but in a response that is left out.
    """
    # log k in float64: a sequence adds up thousands of them before the exponential.
    log_k = (logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    if level != "token":
        of_response = log_k.sum(dim=1, keepdim=True)
        if level == "geometric":
            # The |o|-th root of a product is the mean of its logarithms.
            of_response = of_response / loss_mask.sum(dim=1, keepdim=True)
        log_k = of_response.expand_as(log_k)
    k = log_k.exp()
    if kind == "tis" and level != "geometric":
        # Truncated from above alone: a token that the generator over-sampled has a small k, which stays.
        return k.clamp(max=high).to(logprobs.dtype), k > high
    is_outside = (k < low) | (k > high)
    inside = k
    if level == "geometric":
        # A root is no importance weight: it only chooses.
        inside = torch.ones_like(k)
    return torch.where(is_outside, 0.0, inside).to(logprobs.dtype), is_outside
