"""Distillation from a teacher: by the tokens that were sampled, or by whole distributions (`distillation_beta`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from msgspec import UNSET
from torch import Tensor

from consumer.gradient.terms.base import LossSpec, Metric, Need, StepSums, TermInputs, TermLoss
from consumer.gradient.terms.kl_estimators import k3_sum

TEACHER_K3 = "teacher_k3"
TEACHER_TOKENS = "tokens_of_teacher"


def _mean_k3(step: StepSums) -> float | None:
    if step.total(TEACHER_TOKENS):
        return step.per_trained_token(TEACHER_K3)
    return None


KL_TO_TEACHER = Metric(
    name="kl_to_teacher",
    meaning="Mean of k3 = e^d - d - 1 with d = log π_T - log π, an estimate of KL(policy ‖ teacher) in nats a token, "
    "over the trained tokens, before each step. Left out without distillation.",
    reduce=_mean_k3,
)


@dataclass(frozen=True, kw_only=True)
class SampledDistillationTerm:
    """`distillation_coefficient` times the reverse KL to the teacher at each token that the student sampled.

    It is a mean over what was sampled, like the policy term, so the same correction weighs it.
    """

    name: ClassVar[str] = "distillation"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER})
    metrics: ClassVar[tuple[Metric, ...]] = (KL_TO_TEACHER,)

    coefficient: float
    gives_loss: bool = True
    is_weighed: bool = True
    needs_every_row: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        algorithm = loss.algorithm
        if algorithm.distillation_coefficient == 0.0 or algorithm.distillation_beta is not UNSET:
            return None
        return cls(coefficient=algorithm.distillation_coefficient)

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        policy = inputs.tokens.policy
        teacher = inputs.tokens.teacher
        if teacher is None:
            raise ValueError("distillation needs the teacher's log-probs")
        divergence = reverse_kl(inputs.log_ratio(), policy, teacher)
        return TermLoss(token_loss=self.coefficient * divergence, sums=_sums(inputs))


@dataclass(frozen=True, kw_only=True)
class DistributionDistillationTerm:
    """`distillation_coefficient` times the divergence from the teacher's whole distribution at each token (GKD).

    It is of whole distributions, whichever token was drawn: no weight of samples applies.
    """

    name: ClassVar[str] = "distillation_of_distributions"
    needs: ClassVar[frozenset[Need]] = frozenset({Need.TEACHER, Need.TEACHER_DIVERGENCE})
    metrics: ClassVar[tuple[Metric, ...]] = (KL_TO_TEACHER,)

    coefficient: float
    gives_loss: bool = True
    is_weighed: bool = False
    needs_every_row: bool = True

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        algorithm = loss.algorithm
        if algorithm.distillation_coefficient == 0.0 or algorithm.distillation_beta is UNSET:
            return None
        return cls(coefficient=algorithm.distillation_coefficient)

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        divergence = inputs.tokens.divergence
        if divergence is None:
            raise ValueError("distillation_beta needs the divergence from the teacher's distributions")
        return TermLoss(token_loss=self.coefficient * divergence, sums=_sums(inputs))


def _sums(inputs: TermInputs) -> dict[str, float]:
    if inputs.tokens.teacher is None:
        return {}
    return {
        TEACHER_K3: k3_sum(inputs.tokens.policy, inputs.tokens.teacher, inputs.loss_mask),
        # Says that a teacher was there: a mean over none is left out, and not 0.
        TEACHER_TOKENS: float(inputs.loss_mask.sum()),
    }


def reverse_kl(log_ratio: Tensor, logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Computes the reverse KL to a teacher at each token that the student sampled, [R, T] each: on-policy distillation.

        l = rho sg(log pi(o_t) - log pi_teacher(o_t)),  rho = pi(o_t) / pi_old(o_t)

    Lu and Thinking Machines Lab 2025, "On-Policy Distillation": the student samples, the teacher judges every token,
    and no token is charged with what the ones after it cost (a discount of 0). In the first update pi is pi_old and
    this is their advantage, log pi_teacher - log pi_old, as a policy gradient. Its mean over pi_old's samples has the
    gradient of KL(pi || pi_teacher) at each prefix, also where pi has left pi_old: the score is that of pi as it is
    now, not of pi_old. So it is 0 where the student gives a token the teacher's probability, a step can't be pulled
    past it, and no clip is needed; the advantage of PPO, which is fixed while pi moves, needs one.

    log_ratio: log rho, whose gradient it has (`TermInputs.log_ratio`).
    """
    # pi - teacher, as a loss: a token that the student likes more than the teacher is made less likely.
    return log_ratio.exp() * (logprobs.detach() - teacher_logprobs)
