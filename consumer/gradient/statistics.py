"""The numbers of a trained iteration: each is declared with the function that makes it of the batches.

    pass ─▶ sums of each term ─▶ BatchStats ─▶ StepSums ─▶ Metric.reduce ─▶ mean over the steps ─▶ loss_metrics

The numbers of the loss are declared by its terms (consumer/gradient/terms/), those of the rollouts alone in
onbeat/loop/sampled.py, and the others here. `math.fsum` rounds once, in any order of the batches (I7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from consumer.gradient.advantages.estimators import ADVANTAGES, clipped
from consumer.gradient.cost import TrainingCost
from consumer.gradient.losses.family import policy_loss
from consumer.gradient.micro_batch import MicroBatch
from consumer.gradient.terms.base import LossTerm, Metric, StepSums, metrics_of, share
from contracts.errors import ContractViolation
from contracts.spec.algorithm import AlgorithmSpec
from onbeat.loop.sampled import BatchesOf, SampledNumbers, SampledStats, mean, number, numbers_of, unbiased_std


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The distance of trainer and generator over some tokens; rho = trainer probability / generator probability.

    Under a lag that is how far the policy has moved since it sampled, on top of the gap between the two engines.
    """

    num_tokens: int = 0
    k3_sum: float = 0.0
    """Sum of rho - log(rho) - 1, an estimate of KL(generator || trainer) at each token."""
    largest: float = 0.0
    """The largest |trainer_logprobs - generator_logprobs|."""
    rho_sum: float = 0.0
    rho_square_sum: float = 0.0
    log_weights: tuple[float, ...] = ()
    """The logarithm of each response's weight: the sum of log(rho) over its tokens."""

    @property
    def k3(self) -> float:
        """Mean over the tokens."""
        return share(self.k3_sum, self.num_tokens)

    @property
    def effective_sample_share(self) -> float:
        """Kish's effective sample size: the share of the tokens that would tell as much if all weighed the same.

        1.0 where there are no tokens.
        """
        if not self.num_tokens:
            return 1.0
        # (sum rho)^2 / (n sum rho^2): 1 where all weigh the same, 1/n where one token has all the weight.
        return self.rho_sum**2 / (self.num_tokens * self.rho_square_sum)

    @property
    def effective_sequence_share(self) -> float:
        """The same share of the responses, whose weights are products; 1.0 where there are none."""
        # The share doesn't change with the scale: the largest weight is made 1, so that none overflows.
        largest = max(self.log_weights, default=0.0)
        # Weights of responses are products over thousands of tokens: as they are, they would overflow.
        weights = [math.exp(log_weight - largest) for log_weight in self.log_weights]
        squares = math.fsum(weight * weight for weight in weights)
        if not squares:
            return 1.0
        return math.fsum(weights) ** 2 / (len(weights) * squares)


def joined(mismatches: Iterable[Mismatch]) -> Mismatch:
    """Adds mismatches up, to the mismatch over the tokens of all of them; their order doesn't show."""
    parts = list(mismatches)
    return Mismatch(
        num_tokens=sum(part.num_tokens for part in parts),
        k3_sum=math.fsum(part.k3_sum for part in parts),
        largest=max((part.largest for part in parts), default=0.0),
        rho_sum=math.fsum(part.rho_sum for part in parts),
        rho_square_sum=math.fsum(part.rho_square_sum for part in parts),
        log_weights=tuple(weight for part in parts for weight in part.log_weights),
    )


@dataclass(frozen=True, kw_only=True)
class BatchStats(SampledStats):
    """The numbers of one trained rollout batch, which add up to the iteration's.

    `train_micro_batch` creates them, a later update replaces the loss and its sums, and the report of the iteration
    reads them.
    """

    advantages: tuple[float, ...] = ()
    """The advantage of every completion, before what only the whole iteration knows (`Scaling`); with credit by turn of
    every turn."""
    trained_rows: tuple[int, ...] = ()
    """Rows of the batch that went through the model."""
    loss_sum: float = 0.0
    """The loss of the rows that went through the model, undivided."""
    term_sums: dict[str, float] = field(default_factory=dict)
    """The sums of the loss's terms over these rows, by name; empty where none went through the model."""
    mismatch: Mismatch = field(default_factory=Mismatch)
    cost: TrainingCost = field(default_factory=TrainingCost)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The divisor that makes loss and gradient of the iteration's sums, once: sum / divisor.

    `iteration_scaling` creates it when the last batch is in; the steps and the report read it.
    """

    count: int
    """Completions, tokens or batches, by the loss."""
    deviation: float = 1.0
    """A / deviation is an advantage."""

    @property
    def divisor(self) -> float:
        return self.count * self.deviation


class TrainedBatches(BatchesOf[BatchStats]):
    """The batches of an iteration, or of one of its steps, as `IterationNumbers` reads them."""

    def __init__(self, stats: Iterable[BatchStats], scaling: Scaling, metrics: Sequence[Metric]) -> None:
        """Takes the batches' numbers, the scaling of `iteration_scaling`, and the metrics of the job's loss."""
        super().__init__(stats)
        self.scaling = scaling
        self._metrics = metrics

    @cached_property
    def advantages(self) -> list[float]:
        # Undivided: gdpo, lite_ppo and reinforce++_baseline know their deviation only now.
        raw = [advantage for stats in self.ordered for advantage in stats.advantages]
        return [advantage / self.scaling.deviation for advantage in raw]

    @cached_property
    def gap(self) -> Mismatch:
        """The mismatch of trainer and generator over all tokens that went through the model."""
        return joined(stats.mismatch for stats in self.ordered)

    @property
    def loss(self) -> float:
        # The same divisor as the gradient's, so the number is the loss that was stepped on.
        return math.fsum(stats.loss_sum for stats in self.ordered) / self.scaling.divisor

    @property
    def loss_metrics(self) -> dict[str, float]:
        """The numbers of the loss's terms that these batches have."""
        sums = self.step_sums()
        numbers = {metric.name: metric.reduce(sums) for metric in self._metrics}
        return {name: value for name, value in numbers.items() if value is not None}

    def step_sums(self) -> StepSums:
        """Returns the sums that the metrics of the loss are made of."""
        names = {name: None for stats in self.ordered for name in stats.term_sums}
        return StepSums(
            sums={name: math.fsum(stats.term_sums.get(name, 0.0) for stats in self.ordered) for name in names},
            num_sampled_tokens=self.sum("num_tokens"),
            num_trained_tokens=self.gap.num_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class IterationNumbers(SampledNumbers):
    """The fields of IterationMetrics that an iteration's batches give, by name: `**dataclasses.asdict(numbers)`.

    `loss` and `loss_metrics` are means over the iteration's optimizer steps, the others are of its rollouts.
    """

    advantage_mean: float = number(lambda its: mean(its.advantages))
    advantage_std: float = number(lambda its: unbiased_std(its.advantages))
    advantage_max: float = number(lambda its: max(map(abs, its.advantages), default=0.0))
    loss: float = number(lambda its: its.loss)
    mismatch_k3: float = number(lambda its: its.gap.k3)
    mismatch_max: float = number(lambda its: its.gap.largest)
    effective_sample_share: float = number(lambda its: its.gap.effective_sample_share)
    effective_sequence_share: float = number(lambda its: its.gap.effective_sequence_share)
    loss_metrics: dict[str, float] = number(lambda its: its.loss_metrics)
    """The numbers of the loss's terms, by `Metric.name`."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """An optimizer step with the numbers of its batches. The step phase creates it, and the report reads it."""

    stats: Sequence[BatchStats]
    """The numbers of the batches that the step was taken on, with the loss that it went down."""
    scaling: Scaling
    """The iteration's, with the count of these batches."""
    grad_norm: float
    """The gradient's norm before clipping."""


def measure_mismatch(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Measures the masked tokens of [R, T] log-probs, in float64. Raises ContractViolation where they aren't finite."""
    # The sign is that of log rho = trainer - generator; padding is 0.0 in the sums of responses below.
    gaps = (trainer_logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    log_ratio = gaps[loss_mask]
    ratio = log_ratio.exp()
    k3_sum, rho_sum, rho_square_sum, largest = torch.stack(
        ((ratio - log_ratio - 1.0).sum(), ratio.sum(), ratio.square().sum(), log_ratio.abs().max())
    ).tolist()
    # A huge but finite ratio may overflow its square: that alone is no fault of the log-probs.
    if not math.isfinite(rho_square_sum) and not bool(generator_logprobs.isfinite().all()):
        raise ContractViolation("log-probs must be finite", field="generator_logprobs")
    return Mismatch(
        num_tokens=log_ratio.numel(),
        k3_sum=k3_sum,
        largest=largest,
        rho_sum=rho_sum,
        rho_square_sum=rho_square_sum,
        # Natural logarithm of each response's product of rho, over its sampled tokens.
        log_weights=tuple(gaps.sum(dim=1).tolist()),
    )


class MeasuredPass(Protocol):
    """The part of a pass that says how far the policy and the generator are apart."""

    @property
    def old_logprobs(self) -> Tensor:
        """[R, T] of the policy before the iteration's first step."""
        ...

    @property
    def micro_batch(self) -> MicroBatch:
        """The rows, with the generator's log-probs and the mask of the sampled tokens."""
        ...


def mismatch_over(passes: Sequence[MeasuredPass], *, learns_given: bool) -> Mismatch:
    """Measures how far the policy and the generator are apart over the tokens of a batch.

    Args:
        passes: The batch's.
        learns_given: True where completions of the data set are learned: they were sampled by no policy, from which
            this one could be apart.

    Raises:
        ContractViolation: As `measure_mismatch`.
    """
    mismatches: list[Mismatch] = []
    for one_pass in passes:
        trainer_logprobs = one_pass.old_logprobs
        generator_logprobs = trainer_logprobs
        if not learns_given:
            generator_logprobs = one_pass.micro_batch.generator_logprobs.to(trainer_logprobs.device)
        loss_mask = one_pass.micro_batch.loss_mask.to(trainer_logprobs.device)
        mismatches.append(measure_mismatch(trainer_logprobs, generator_logprobs, loss_mask))
    return joined(mismatches)


def iteration_scaling(batches: Sequence[BatchStats], algorithm: AlgorithmSpec) -> Scaling:
    """Computes the divisor that only the whole iteration knows; batches: at least one, in any order."""
    advantages = [advantage for stats in batches for advantage in stats.advantages]
    rewards = clipped(np.array([reward for stats in batches for reward in stats.rewards]), algorithm)
    deviation = ADVANTAGES[algorithm.advantage].late_deviation(
        advantages, rewards.tolist(), algorithm.advantage_epsilon
    )
    return Scaling(count=divided_by(batches, algorithm), deviation=deviation)


def divided_by(batches: Sequence[BatchStats], algorithm: AlgorithmSpec) -> int:
    """Returns the count that the loss of these batches is divided by: completions, tokens or batches, by the loss."""
    # All completions and tokens of the batches, those that didn't go through the model too: they add 0 to the loss.
    counts = {
        "completions": sum(len(stats.rewards) for stats in batches),
        "tokens": sum(stats.num_tokens for stats in batches),
        "batches": len(batches),
    }
    return counts[policy_loss(algorithm).normaliser.counts]


def iteration_numbers(
    batches: Iterable[BatchStats], *, scaling: Scaling, terms: Sequence[LossTerm]
) -> IterationNumbers:
    """Makes the numbers of a whole iteration, or of one of its steps.

    Args:
        batches: At least one, in any order.
        scaling: As `iteration_scaling` has it.
        terms: Of the job's loss.
    """
    return numbers_of(IterationNumbers, TrainedBatches(batches, scaling, metrics_of(terms)))


def counts_by_lag(batches: Iterable[BatchStats], *, max_policy_lag: int) -> tuple[int, ...]:
    """Counts the batches by their lag, from 0 to max_policy_lag; () in a job without one."""
    counts = Counter(stats.lag for stats in batches)
    if not max_policy_lag:
        return ()
    return tuple(counts[lag] for lag in range(max_policy_lag + 1))


def mean_over_updates(
    whole: IterationNumbers, numbers: Sequence[IterationNumbers], *, terms: Sequence[LossTerm]
) -> IterationNumbers:
    """Makes the numbers of an iteration from those of its optimizer steps.

    Args:
        whole: Of all batches as they were before the first step.
        numbers: Of each step, at least one.
        terms: Of the job's loss.
    """
    return replace(
        whole,
        loss=mean([of_step.loss for of_step in numbers]),
        loss_metrics=_mean_metrics([of_step.loss_metrics for of_step in numbers], metrics_of(terms)),
    )


def _mean_metrics(of_steps: Sequence[Mapping[str, float]], metrics: Sequence[Metric]) -> dict[str, float]:
    """Returns the mean of each metric over the steps that have it, by name."""
    means: dict[str, float] = {}
    for metric in metrics:
        values = [numbers[metric.name] for numbers in of_steps if metric.name in numbers]
        if values:
            means[metric.name] = mean(values)
        elif metric.without_steps is not None:
            means[metric.name] = metric.without_steps
    return means
