"""The numbers of a trained iteration: each is declared with what makes it of the batches, and its mean over updates.

What is of the rollouts alone stands in onbeat/loop/sampled.py. `math.fsum` rounds once, in any order of them (I7).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from consumer.gradient.advantages.estimators import ADVANTAGES, clipped
from consumer.gradient.cost import TrainingCost
from consumer.gradient.losses.objective import LossSums, policy_loss
from contracts.errors import ContractViolation
from contracts.spec.algorithm import AlgorithmSpec
from onbeat.loop.sampled import BatchesOf, SampledNumbers, SampledStats, mean, number, numbers_of, unbiased_std


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """How far trainer and generator are apart over some tokens; rho = trainer probability / generator probability.

    Under a lag that is how far the policy has moved since it sampled, on top of the gap between the two engines.
    """

    num_tokens: int = 0
    k3_sum: float = 0.0
    """Sum of rho - log(rho) - 1, an estimate of KL(generator || trainer) at each token."""
    largest: float = 0.0
    """Largest |trainer_logprobs - generator_logprobs|."""
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
        """Kish's: the share of the tokens that would tell as much if all weighed the same; 1.0 of none."""
        return self.rho_sum**2 / (self.num_tokens * self.rho_square_sum) if self.num_tokens else 1.0

    @property
    def effective_sequence_share(self) -> float:
        """The same of the responses, whose weights are products; 1.0 of none."""
        # The share doesn't change with the scale: the largest weight is made 1, so that none overflows.
        largest = max(self.log_weights, default=0.0)
        weights = [math.exp(one - largest) for one in self.log_weights]
        squares = math.fsum(weight * weight for weight in weights)
        return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 1.0


def joined(mismatches: Iterable[Mismatch]) -> Mismatch:
    """The mismatch over the tokens of all, in any order."""
    each = list(mismatches)
    return Mismatch(
        num_tokens=sum(one.num_tokens for one in each),
        k3_sum=math.fsum(one.k3_sum for one in each),
        largest=max((one.largest for one in each), default=0.0),
        rho_sum=math.fsum(one.rho_sum for one in each),
        rho_square_sum=math.fsum(one.rho_square_sum for one in each),
        log_weights=tuple(weight for one in each for weight in one.log_weights),
    )


@dataclass(frozen=True, kw_only=True)
class BatchStats(SampledStats, LossSums):
    """What one trained rollout batch adds to the iteration's numbers."""

    advantages: tuple[float, ...] = ()
    """The advantage of every completion, before what only the whole iteration knows (`Scaling`); with credit by turn of
    every turn."""
    trained_rows: tuple[int, ...] = ()
    """Rows of the batch that went through the model."""
    loss_sum: float = 0.0
    """It and what `LossSums` has are of the rows that went through the model."""
    mismatch: Mismatch = field(default_factory=Mismatch)
    cost: TrainingCost = field(default_factory=TrainingCost)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The divisor that makes loss and gradient of the iteration's sums, once: sum / divisor."""

    count: int
    """Completions, tokens or batches, by the loss."""
    deviation: float = 1.0
    """A / deviation is an advantage."""

    @property
    def divisor(self) -> float:
        return self.count * self.deviation


class TrainedBatches(BatchesOf[BatchStats]):
    """The batches of an iteration, or of one of its steps."""

    def __init__(self, stats: Iterable[BatchStats], scaling: Scaling) -> None:
        """scaling: of `iteration_scaling`."""
        super().__init__(stats)
        self.scaling = scaling

    @cached_property
    def advantages(self) -> list[float]:
        raw = [advantage for one in self.ordered for advantage in one.advantages]
        return [advantage / self.scaling.deviation for advantage in raw]

    @cached_property
    def gap(self) -> Mismatch:
        """How far trainer and generator are apart over all that went through the model."""
        return joined(one.mismatch for one in self.ordered)

    @property
    def loss(self) -> float:
        return math.fsum(one.loss_sum for one in self.ordered) / self.scaling.divisor

    @property
    def explained_variance(self) -> float | None:
        """1 - mean (V - R)^2 / var R over the tokens; None without a critic, or where all returns are equal."""
        if not (num := self.sum("num_valued_tokens")):
            return None
        square = self.sum("return_square_sum") / num
        variance = square - (self.sum("return_sum") / num) ** 2
        # What is left of equal returns is the rounding of their squares, of either sign.
        return 1.0 - self.sum("value_error_sum") / num / variance if variance > 1e-12 * square else None

    def per_token(self, *names: str) -> float:
        """The sum of these over the sampled tokens."""
        return share(sum(self.sum(name) for name in names), self.sum("num_tokens"))

    def per_seen_token(self, name: str) -> float:
        """The sum over the tokens that went through the model."""
        return share(self.sum(name), self.gap.num_tokens)


EACH = "each update has its own: the iteration's is their mean"
CLIPPING = "the mean over the updates that can clip, for the ratio can't leave 1 in the others"


@dataclass(frozen=True, kw_only=True)
class IterationNumbers(SampledNumbers):
    """The fields of IterationMetrics that are numerics, under the same names: `**dataclasses.asdict(numbers)`."""

    advantage_mean: float = number(lambda its: mean(its.advantages))
    advantage_std: float = number(lambda its: unbiased_std(its.advantages))
    advantage_max: float = number(lambda its: max(map(abs, its.advantages), default=0.0))
    loss: float = number(lambda its: its.loss, over=EACH)
    clip_share: float = number(lambda its: its.per_token("num_clipped_low", "num_clipped_high"), over=CLIPPING)
    clip_low_share: float = number(lambda its: its.per_token("num_clipped_low"), over=CLIPPING)
    clip_high_share: float = number(lambda its: its.per_token("num_clipped_high"), over=CLIPPING)
    kl_to_reference: float = number(lambda its: its.per_seen_token("k3_sum"), over=EACH)
    kl_to_teacher: float | None = number(
        lambda its: its.per_seen_token("teacher_k3_sum") if any(one.has_teacher for one in its.ordered) else None,
        over=EACH,
    )
    entropy_trained_tokens: float | None = number(
        lambda its: its.sum("entropy_sum") / measured if (measured := its.sum("num_entropy_tokens")) else None,
        over=EACH,
    )
    value_loss: float | None = number(
        lambda its: its.sum("value_error_sum") / 2.0 / num if (num := its.sum("num_valued_tokens")) else None, over=EACH
    )
    explained_variance: float | None = number(lambda its: its.explained_variance, over=EACH)
    corrected_share: float = number(lambda its: its.per_seen_token("num_corrected"), over=EACH)
    mismatch_k3: float = number(lambda its: its.gap.k3)
    mismatch_max: float = number(lambda its: its.gap.largest)
    effective_sample_share: float = number(lambda its: its.gap.effective_sample_share)
    effective_sequence_share: float = number(lambda its: its.gap.effective_sequence_share)


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step."""

    stats: Sequence[BatchStats]
    """The numbers of the batches that it was taken on, with the loss that it went down."""
    scaling: Scaling
    """With their count."""
    grad_norm: float
    """The gradient's norm before clipping."""


def measure_mismatch(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Measures the masked tokens of [R, T] log-probs, in float64. Raises ContractViolation where they aren't finite."""
    gaps = (trainer_logprobs.detach().double() - generator_logprobs.double()).masked_fill(~loss_mask, 0.0)
    log_ratio = gaps[loss_mask]
    ratio = log_ratio.exp()
    k3_sum, rho_sum, rho_square_sum, largest = torch.stack(
        ((ratio - log_ratio - 1.0).sum(), ratio.sum(), ratio.square().sum(), log_ratio.abs().max())
    ).tolist()
    if not math.isfinite(rho_square_sum) and not bool(generator_logprobs.isfinite().all()):
        raise ContractViolation("log-probs must be finite", field="generator_logprobs")
    return Mismatch(
        num_tokens=log_ratio.numel(),
        k3_sum=k3_sum,
        largest=largest,
        rho_sum=rho_sum,
        rho_square_sum=rho_square_sum,
        log_weights=tuple(gaps.sum(dim=1).tolist()),
    )


def iteration_scaling(batches: Sequence[BatchStats], algorithm: AlgorithmSpec) -> Scaling:
    """Computes what only the whole iteration knows; at least one batch, in any order."""
    advantages = [advantage for stats in batches for advantage in stats.advantages]
    rewards = clipped(np.array([reward for stats in batches for reward in stats.rewards]), algorithm)
    deviation = ADVANTAGES[algorithm.advantage].late_deviation(
        advantages, rewards.tolist(), algorithm.advantage_epsilon
    )
    return Scaling(count=divided_by(batches, algorithm), deviation=deviation)


def divided_by(batches: Sequence[BatchStats], algorithm: AlgorithmSpec) -> int:
    """Counts what the loss of these batches is divided by."""
    counts = {
        "completions": sum(len(stats.rewards) for stats in batches),
        "tokens": sum(stats.num_tokens for stats in batches),
        "batches": len(batches),
    }
    return counts[policy_loss(algorithm).normaliser.counts]


def iteration_numbers(batches: Iterable[BatchStats], *, scaling: Scaling) -> IterationNumbers:
    """Makes the numbers of the whole iteration; at least one batch, in any order. scaling: of `iteration_scaling`."""
    return numbers_of(IterationNumbers, TrainedBatches(batches, scaling))


def counts_by_lag(batches: Iterable[BatchStats], *, max_policy_lag: int) -> tuple[int, ...]:
    """Counts the batches by their lag, from 0 to max_policy_lag; () in a job without one."""
    counts = Counter(stats.lag for stats in batches)
    return tuple(counts[lag] for lag in range(max_policy_lag + 1)) if max_policy_lag else ()


def mean_over_updates(
    whole: IterationNumbers, numbers: Sequence[IterationNumbers], *, can_clip: Sequence[bool]
) -> IterationNumbers:
    """Makes the numbers of the iteration from those of each update, as they are declared. whole: of all batches as they
    were before the first step."""
    clipping = [of_one for of_one, clips in zip(numbers, can_clip, strict=True) if clips]
    rules = {one.name: one.metadata.get("over") for one in fields(IterationNumbers)}
    means = {name: _mean(numbers, name) for name, rule in rules.items() if rule == EACH}
    means |= {name: _mean(clipping, name) or 0.0 for name, rule in rules.items() if rule == CLIPPING}
    return replace(whole, **means)  # pyright: ignore[reportArgumentType]


def _mean(numbers: Sequence[IterationNumbers], name: str) -> float | None:
    """Returns the mean of one number; None where there are no updates, or one of them doesn't have it."""
    values = [getattr(of_one, name) for of_one in numbers]
    return None if not values or None in values else math.fsum(values) / len(values)


def share(part: float, whole: int) -> float:
    """0.0 of nothing."""
    return part / whole if whole else 0.0
