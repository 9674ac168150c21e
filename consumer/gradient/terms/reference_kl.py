"""The KL to the reference: in the loss, or, where `kl_placement = "reward"` takes it off the reward, as a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from consumer.gradient.terms.base import LossSpec, Metric, Need, TermInputs, TermLoss, TokenOutputs
from consumer.gradient.terms.kl_estimators import ESTIMATORS, Estimator, estimate_weight, k3_sum

REFERENCE_K3 = "reference_k3"


@dataclass(frozen=True, kw_only=True)
class ReferenceKlTerm:
    """`kl_coefficient` times an estimate of KL(policy || reference) at each token.

    The estimate is weighed by the policy ratio and the correction, like the surrogate, which gives it the gradient of
    that divergence under each schedule; with `use_bias_correction_kl = false` it is added as it is.
    """

    name: ClassVar[str] = "reference_kl"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.REFERENCE})
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="kl_to_reference",
            meaning="Mean of k3 = e^d - d - 1 with d = log π_ref - log π, an estimate of KL(policy ‖ reference) in "
            "nats a token, over the trained tokens: all that were sampled, but for completions that "
            '`on_truncated = "mask"` leaves out. The policy is the one before each step. Left out without a reference.',
            reduce=lambda step: step.per_trained_token(REFERENCE_K3),
        ),
    )

    coefficient: float
    estimator: Estimator
    gives_loss: bool
    """False where the KL is in the reward."""
    is_weighed: bool
    # In the reward, too: the advantage of a row is known when the row has gone through the model.
    needs_every_row: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        algorithm = loss.algorithm
        if algorithm.kl_coefficient == 0.0:
            return None
        return cls(
            coefficient=algorithm.kl_coefficient,
            estimator=algorithm.kl_estimator,
            gives_loss=algorithm.kl_in_loss,
            is_weighed=algorithm.weighs_kl,
        )

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        policy = inputs.tokens.policy
        reference = reference_of(inputs.tokens)
        sums = {REFERENCE_K3: k3_sum(policy, reference, inputs.loss_mask)}
        if not self.gives_loss:
            return TermLoss(token_loss=None, sums=sums)
        divergence = ESTIMATORS[self.estimator](policy, reference)
        if not self.is_weighed:
            # Plus: a larger divergence is a larger loss.
            return TermLoss(token_loss=self.coefficient * divergence, sums=sums)
        # The ratio is 1 in an iteration's first step, and yet changes the gradient: it has one of its own.
        weight = estimate_weight(inputs.log_ratio(), self.estimator)
        # The order of the products is part of a job's digest.
        return TermLoss(token_loss=self.coefficient * weight * divergence, sums=sums)


def reference_of(tokens: TokenOutputs) -> Tensor:
    """Returns the reference's log-probs [R, T]. Raises ValueError where no model gave them."""
    if tokens.reference is None:
        raise ValueError("a divergence needs the reference's log-probs")
    return tokens.reference


def token_divergences(tokens: TokenOutputs, *, loss_mask: Tensor, estimator: Estimator) -> Tensor:
    """Estimates the KL for a KL in the reward at each token: float64 [R, T], without gradient, 0.0 in padding."""
    masked = tokens.masked(loss_mask)
    return ESTIMATORS[estimator](masked.policy.detach().double(), reference_of(masked).double())
