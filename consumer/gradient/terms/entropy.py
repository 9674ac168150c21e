"""The entropy bonus; also the entropy as a metric alone (`trainer.measure_entropy`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from consumer.gradient.terms.base import LossSpec, Metric, Need, StepSums, TermInputs, TermLoss

ENTROPY = "entropy"
ENTROPY_TOKENS = "tokens_of_entropy"


def _mean_entropy(step: StepSums) -> float | None:
    num_tokens = step.total(ENTROPY_TOKENS)
    if not num_tokens:
        return None
    return step.total(ENTROPY) / num_tokens


@dataclass(frozen=True, kw_only=True)
class EntropyTerm:
    """Minus `entropy_coefficient` times the entropy of the policy's whole distribution at each sampled token.

    It is of whole distributions, so no weight of samples applies. With a coefficient of 0 it is measured alone, unless
    `trainer.measure_entropy = false` saves that.
    """

    name: ClassVar[str] = "entropy"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.ENTROPY})
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="entropy_trained_tokens",
            meaning="Mean entropy of the whole distribution, in nats, over the tokens of rows that teach, which alone "
            "go through the trainer's model: so it is higher where many groups are equal. Left out where it is not "
            "measured, or nothing teaches.",
            reduce=_mean_entropy,
        ),
    )

    coefficient: float
    is_weighed: bool = False

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        coefficient = loss.algorithm.entropy_coefficient
        if coefficient == 0.0 and not loss.measures_entropy:
            return None
        return cls(coefficient=coefficient)

    @property
    def gives_loss(self) -> bool:
        return self.coefficient > 0.0

    @property
    def needs_every_row(self) -> bool:
        return self.gives_loss

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        entropy = inputs.tokens.entropy
        if entropy is None:
            raise ValueError("an entropy bonus needs the entropy of the distributions")
        # Padding holds 0.0.
        sums = {ENTROPY: float(entropy.detach().double().sum()), ENTROPY_TOKENS: float(inputs.loss_mask.sum())}
        if not self.gives_loss:
            return TermLoss(token_loss=None, sums=sums)
        # A bonus: more entropy, less loss. Hence the sign.
        return TermLoss(token_loss=-self.coefficient * entropy, sums=sums)
