"""A term of a loss in one file, as an engineer who has read docs/change.md would write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from consumer.gradient.terms.base import LossSpec, Metric, Need, TermInputs, TermLoss


@dataclass(frozen=True, kw_only=True)
class ConfidenceTerm:
    """Half the square of log π at each sampled token, times 0.25."""

    name: ClassVar[str] = "confidence"
    needs: ClassVar[frozenset[Need]] = frozenset()
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="mean_confidence",
            meaning="Mean of log π over the trained tokens, in nats.",
            reduce=lambda step: step.per_trained_token("confidence"),
        ),
    )

    coefficient: float
    is_weighed: bool = False
    needs_every_row: bool = True
    gives_loss: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self:
        return cls(coefficient=0.25)

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        logprobs = inputs.tokens.policy
        return TermLoss(
            token_loss=self.coefficient * logprobs.square() / 2.0,
            sums={"confidence": float(logprobs.detach().double().sum())},
        )
