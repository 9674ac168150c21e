"""The critic's loss, for `advantage = "gae"`: PPO's (Schulman et al., arXiv 1707.06347, equation 9).

    l_t = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)

R_t is the return that consumer/gradient/advantages/gae.py makes, V_old the value before the iteration's first step, and
c is `value_clip`; without one l_t = (V - R)^2 / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from consumer.gradient.advantages.gae import Estimates
from consumer.gradient.terms.base import LossSpec, Metric, Need, StepSums, TermInputs, TermLoss

VALUE_COEFFICIENT = 0.1
ERROR_SQUARES = "value_error_squares"
RETURNS = "returns"
RETURN_SQUARES = "return_squares"
VALUED_TOKENS = "tokens_of_critic"
ROUNDING = 1e-12
"""The variance of returns that are all equal is the rounding of their squares, up to this part of the mean square."""


def _value_loss(step: StepSums) -> float | None:
    num_tokens = step.total(VALUED_TOKENS)
    if not num_tokens:
        return None
    # Half a square, as the loss has it, but without its coefficient.
    return step.total(ERROR_SQUARES) / 2.0 / num_tokens


def _explained_variance(step: StepSums) -> float | None:
    num_tokens = step.total(VALUED_TOKENS)
    if not num_tokens:
        return None
    mean_square = step.total(RETURN_SQUARES) / num_tokens
    # E[R^2] - E[R]^2, from sums that add up over batches.
    variance = mean_square - (step.total(RETURNS) / num_tokens) ** 2
    if variance <= ROUNDING * mean_square:
        return None
    return 1.0 - step.total(ERROR_SQUARES) / num_tokens / variance


@dataclass(frozen=True, kw_only=True)
class ValueTerm:
    """`value_coefficient` times the critic's squared error at each token.

    Its gradient is the critic's alone, and a regression: no weight of samples applies.
    """

    name: ClassVar[str] = "value"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.VALUES})
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="value_loss",
            meaning="Mean of (V - R)² / 2 over the trained tokens, before each step. Left out without a critic.",
            reduce=_value_loss,
        ),
        Metric(
            name="explained_variance",
            meaning="1 - mean (V - R)² / var R over the trained tokens: 1 for a critic that predicts each return, 0 "
            "for one that predicts their mean. Left out without a critic, and where all returns are equal.",
            reduce=_explained_variance,
        ),
    )

    coefficient: float
    clip: float | UnsetType
    gives_loss: bool = True
    is_weighed: bool = False
    # The advantage of a row is known when the critic has seen it.
    needs_every_row: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        algorithm = loss.algorithm
        if not algorithm.advantage_kind.has_critic:
            return None
        coefficient = algorithm.value_coefficient
        if coefficient is UNSET:
            coefficient = VALUE_COEFFICIENT
        return cls(coefficient=coefficient, clip=algorithm.value_clip)

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        values = inputs.tokens.values
        estimates = inputs.estimates
        if values is None or estimates is None:
            raise ValueError("the critic's loss needs its values and its returns")
        returns = estimates.returns.to(values.device)[inputs.loss_mask]  # float64
        errors = values.detach()[inputs.loss_mask].double() - returns
        return TermLoss(
            token_loss=self.coefficient * value_loss(values, estimates, clip=self.clip),
            sums={
                ERROR_SQUARES: float(errors.square().sum()),
                RETURNS: float(returns.sum()),
                RETURN_SQUARES: float(returns.square().sum()),
                VALUED_TOKENS: float(returns.numel()),
            },
        )


def value_loss(values: Tensor, estimates: Estimates, *, clip: float | UnsetType) -> Tensor:
    """Computes the critic's loss at each token, [R, T]. values: [R, T] with gradient."""
    returns = estimates.returns.to(values)
    old_values = estimates.values.to(values)
    squares = (values - returns).square()
    if clip is not UNSET:
        # The clip bounds how far the value may move, in units of reward, not where it lies.
        near_old = old_values + (values - old_values).clamp(-clip, clip)
        # The larger of the two: a value that has moved beyond the clip has no gradient towards its return.
        squares = torch.maximum(squares, (near_old - returns).square())
    return squares / 2.0
