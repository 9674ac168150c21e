"""The Protocol that each term of a loss follows, what a term is given, and what it returns.

    needs ─▶ the models' outputs at each token ─▶ token_losses ─▶ [R, T] with gradient, and sums
                                                                        │
                       sums of all passes and batches of a step ─▶ Metric.reduce ─▶ metrics.jsonl, the page, trackers

Shapes: R responses of a pass, T the sampled tokens of the longest.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from torch import Tensor

from consumer.gradient.advantages.gae import Estimates
from consumer.gradient.losses.base import log_ratio_of
from consumer.gradient.terms.correction import Correction
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.job import JobSpec


class Need(enum.Enum):
    """An output of the models that a term reads, next to the log-probs of policy and generator, which are always there.

    `token_outputs` of consumer/gradient/log_probs.py makes what any of a job's terms needs, and nothing else.
    """

    REFERENCE = "log-probs of the reference"
    TEACHER = "log-probs of the teacher"
    TEACHER_DIVERGENCE = "divergence from the teacher's distributions"
    ENTROPY = "entropy of the policy's distributions"
    VALUES = "values of the critic"


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """The outputs of the models at the sampled tokens of one pass; padding may hold any finite value.

    `token_outputs` makes them, `masked` clears the padding, and the terms read them.
    """

    policy: Tensor
    """[R, T] log pi, with gradient."""
    generator: Tensor
    """[R, T] log mu, as the tokens were sampled."""
    old: Tensor | None = None
    """[R, T] of the policy before the iteration's first step; None in that step, where it is the policy itself."""
    reference: Tensor | None = None
    """[R, T] of the reference model."""
    teacher: Tensor | None = None
    """[R, T] of the teacher."""
    divergence: Tensor | None = None
    """[R, T] with gradient, in nats: the divergence from the teacher's whole distribution at each token."""
    entropy: Tensor | None = None
    """[R, T] in nats, of the policy's whole distribution at each token; with gradient where a term trains it."""
    values: Tensor | None = None
    """[R, T] with gradient: what the critic expects before each token."""

    def masked(self, loss_mask: Tensor) -> TokenOutputs:
        """Puts 0.0 where loss_mask is False: an exponential of padding could overflow, and its gradient be NaN."""
        present: dict[str, Tensor] = {name: values for name, values in vars(self).items() if values is not None}
        return TokenOutputs(
            **{name: values.to(self.policy).masked_fill(~loss_mask, 0.0) for name, values in present.items()}
        )


@dataclass(frozen=True, kw_only=True)
class TermInputs:
    """The inputs of a term: one pass. `pass_loss` makes them once for all terms of a job."""

    tokens: TokenOutputs
    """0.0 where loss_mask is False."""
    old_logprobs: Tensor | None
    """[R, T] that the policy ratio is taken against: the generator's, or `tokens.old`. None: the policy itself."""
    advantages: Tensor
    """[R], or [R, T] with credit by turn or token; in the dtype of the log-probs."""
    loss_mask: Tensor
    """bool [R, T]; True on sampled tokens."""
    correction: Correction
    """The weights that multiply the sum of the terms that are weighed."""
    estimates: Estimates | None = None
    """The returns that a critic learns; None without one."""

    def log_ratio(self) -> Tensor:
        """Returns [R, T] log rho = log pi - log pi_old, with gradient; exactly 0.0 where pi_old is the policy."""
        # The sign: above 0 where the policy gives the token more than pi_old did.
        return log_ratio_of(self.tokens.policy, self.old_logprobs)


@dataclass(frozen=True, kw_only=True)
class TermLoss:
    """The loss that a term gives to one pass."""

    token_loss: Tensor | None
    """[R, T] with gradient, the term's coefficient in it; padding may hold any finite value. None: no loss, the term
    only measures."""
    sums: Mapping[str, float]
    """Numbers that add up over passes and batches, by names of the term's own; its metrics are made of them."""


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """The sums of all batches that one optimizer step was taken on."""

    sums: Mapping[str, float]
    """The sums of the terms, by name."""
    num_sampled_tokens: int
    """Sampled tokens of all completions."""
    num_trained_tokens: int
    """The sampled tokens that went through the trainer's model."""

    def total(self, name: str) -> float:
        """Returns a sum; 0.0 where no pass was made."""
        return self.sums.get(name, 0.0)

    def per_sampled_token(self, *names: str) -> float:
        """Returns the total of these sums over all sampled tokens."""
        return share(sum(self.total(name) for name in names), self.num_sampled_tokens)

    def per_trained_token(self, name: str) -> float:
        """Returns a sum over the tokens that went through the trainer's model."""
        return share(self.total(name), self.num_trained_tokens)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that a term reports for each iteration: the mean over those of its optimizer steps that have it.

    The name and the meaning stand here alone. docs/loss-terms.md is made of them, and `IterationMetrics.loss_metrics`
    has the numbers by these names.
    """

    name: str
    meaning: str
    """Sentences for docs/loss-terms.md: what the number is of, in which unit, and when it is left out."""
    reduce: Callable[[StepSums], float | None]
    """Makes the number of one optimizer step; None: that step has none."""
    without_steps: float | None = None
    """The number of an iteration none of whose steps has one; None: the iteration leaves it out."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The part of a job's spec that its terms are made of."""

    algorithm: AlgorithmSpec
    measures_entropy: bool = False
    """True where the entropy is a metric even if it is no term of the loss."""
    lags: bool = False
    """True where an older version of the policy may have sampled."""

    @classmethod
    def of_job(cls, spec: JobSpec) -> Self:
        return cls(
            algorithm=spec.algorithm,
            measures_entropy=spec.trainer.measure_entropy,
            lags=spec.schedule_rule.lags,
        )


class LossTerm(Protocol):
    """A term of a job's loss. `terms_of_job` makes the terms of a job from its spec; they never change.

    docs/change.md says what a new term has to keep, and has an example.
    """

    name: ClassVar[str]
    """The heading of the term in docs/loss-terms.md."""
    metrics: ClassVar[tuple[Metric, ...]]
    """The numbers that it reports."""
    needs: ClassVar[frozenset[Need]]
    """The outputs that it reads, next to the log-probs of policy and generator."""

    @property
    def gives_loss(self) -> bool:
        """False where the term only measures, so that no gradient is needed of what it reads."""
        ...

    @property
    def is_weighed(self) -> bool:
        """True where the loss is a mean over samples, which a correction for their policy weighs."""
        ...

    @property
    def needs_every_row(self) -> bool:
        """True where a completion with an advantage of 0 has a loss all the same, and so goes through the model."""
        ...

    @classmethod
    def of(cls, loss: LossSpec) -> Self | None:
        """Returns the term as a job has it; None where the job doesn't."""
        ...

    def token_losses(self, inputs: TermInputs) -> TermLoss:
        """Computes the loss of each token of one pass. It is a function of its inputs alone (I7)."""
        ...


def share(part: float, whole: float) -> float:
    """Returns part / whole; 0.0 of nothing."""
    if not whole:
        return 0.0
    return part / whole


def needs_every_row(terms: Iterable[LossTerm]) -> bool:
    """Returns True where a completion with an advantage of 0 goes through the model all the same."""
    return any(term.needs_every_row for term in terms)


def metrics_of(terms: Iterable[LossTerm]) -> Sequence[Metric]:
    """Returns the metrics of these terms, in order, each once."""
    # By name: two terms may report the same metric.
    return list({metric.name: metric for term in terms for metric in term.metrics}.values())
