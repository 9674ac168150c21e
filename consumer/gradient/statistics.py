"""Makes the numbers of an iteration from those of its batches; `math.fsum` rounds once, in any order of them (I7)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.gradient.advantages.family import ADVANTAGES
from consumer.gradient.advantages.group_relative import equal_groups
from consumer.gradient.cost import TrainingCost
from consumer.gradient.losses.family import policy_loss
from contracts.errors import ContractViolation
from contracts.rollouts import RolloutBatch
from contracts.spec_tables.algorithm import AlgorithmSpec


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

    def joined(self, other: Mismatch) -> Mismatch:
        """Returns the mismatch over the tokens of both."""
        return Mismatch(
            num_tokens=self.num_tokens + other.num_tokens,
            k3_sum=self.k3_sum + other.k3_sum,
            largest=max(self.largest, other.largest),
            rho_sum=self.rho_sum + other.rho_sum,
            rho_square_sum=self.rho_square_sum + other.rho_square_sum,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatchStats:
    """What one trained rollout batch adds to the iteration's numbers."""

    batch_id: str
    rewards: tuple[float, ...]
    """The reward of every completion, before any shuffling."""
    component_sums: dict[str, float]
    """Sum over completions of each unweighted score."""
    num_groups: int
    num_equal_groups: int
    """Groups of zero advantage."""
    num_resamples: int
    """Groups that were dropped for these."""
    num_tokens: int
    """Sampled tokens."""
    longest_response_tokens: int
    num_truncated: int
    """Completions that hit max_new_tokens."""
    lag: int = 0
    """Iteration - version that sampled."""
    advantages: tuple[float, ...] = ()
    """The advantage of every completion, before what only the whole iteration knows (`Scaling`); with credit by turn of
    every turn."""
    trained_rows: tuple[int, ...] = ()
    """Rows of the batch that went through the model."""
    loss_sum: float = 0.0
    """What follows, down to teacher_k3_sum, is as in `LossTerms`, over the rows that went through the model."""
    baseline_loss_sum: float = 0.0
    """The loss sum of advantages of 1.0; 0.0 without a late baseline."""
    surprise_sum: float = 0.0
    """Sum of -generator_logprobs over the sampled tokens, in nats."""
    num_clipped_low: int = 0
    num_clipped_high: int = 0
    can_clip: bool = False
    num_corrected: int = 0
    entropy_sum: float = 0.0
    num_entropy_tokens: int = 0
    k3_sum: float = 0.0
    teacher_k3_sum: float = 0.0
    has_teacher: bool = False
    mismatch: Mismatch = field(default_factory=Mismatch)
    cost: TrainingCost = field(default_factory=TrainingCost)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What makes loss and gradient of the iteration's sums, once: (sum - baseline * the baseline's sum) / divisor."""

    count: int
    """Completions, tokens or batches, by the loss."""
    baseline: float = 0.0
    deviation: float = 1.0
    """(A - baseline) / deviation is an advantage."""

    @property
    def divisor(self) -> float:
        return self.count * self.deviation


@dataclass(frozen=True, kw_only=True)
class IterationNumbers:
    """The fields of IterationMetrics that are numerics, under the same names: `**dataclasses.asdict(numbers)`."""

    num_batches: int
    num_completions: int
    num_tokens: int
    reward_mean: float
    reward_std: float
    reward_components: dict[str, float]
    zero_advantage_share: float
    num_resamples: int
    advantage_mean: float
    advantage_std: float
    advantage_max: float
    response_tokens_mean: float
    response_tokens_max: int
    truncated_share: float
    loss: float
    clip_share: float
    clip_low_share: float
    clip_high_share: float
    kl_to_reference: float
    kl_to_teacher: float | None
    entropy: float
    entropy_trained_tokens: float | None
    corrected_share: float
    mismatch_k3: float
    mismatch_max: float
    effective_sample_share: float


OF_ONE_UPDATE = ("loss", "kl_to_reference", "kl_to_teacher", "entropy_trained_tokens", "corrected_share")
"""Numbers that each update of an iteration has for itself; the others are of the rollouts."""
OF_A_CLIPPING_UPDATE = ("clip_share", "clip_low_share", "clip_high_share")
"""Numbers that mean something only where the ratio can leave 1."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One optimizer step."""

    stats: Sequence[MicroBatchStats]
    """The numbers of every training batch, with the loss that this step went down."""
    grad_norm: float
    """The gradient's norm before clipping."""


def measure_batch(batch: RolloutBatch, rewards: NDArray[np.float64]) -> MicroBatchStats:
    """Measures what is known of a batch before any forward pass. rewards: [k, G], as sampled.

    Raises ContractViolation where the generator's log-probs are not finite.
    """
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    lengths = [rollout.completion.num_sampled for rollout in rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.reward_breakdown})
    logprobs = b"".join(rollout.completion.generator_logprobs for rollout in rollouts)
    total = float(np.frombuffer(logprobs, dtype="<f4").sum(dtype=np.float64))
    if not math.isfinite(total):
        raise ContractViolation("log-probs must be finite", field="generator_logprobs")
    return MicroBatchStats(
        batch_id=batch.batch_id,
        rewards=tuple(rewards.reshape(-1).tolist()),
        component_sums={
            name: math.fsum(rollout.reward_breakdown.get(name, 0.0) for rollout in rollouts) for name in names
        },
        num_groups=len(batch.groups),
        num_equal_groups=int(equal_groups(rewards).sum()),
        num_resamples=sum(group.num_resamples for group in batch.groups),
        num_tokens=sum(lengths),
        longest_response_tokens=max(lengths),
        num_truncated=sum(rollout.completion.finish_reason == "length" for rollout in rollouts),
        lag=batch.iteration - batch.policy_version,
        # The surprise of a sampled token is -log mu: its mean estimates the entropy of the generator's distribution.
        surprise_sum=-total,
    )


def measure_mismatch(trainer_logprobs: Tensor, generator_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Measures the masked tokens of [R, T] log-probs, in float64. Raises ContractViolation like `measure_batch`."""
    log_ratio = (trainer_logprobs.detach().double() - generator_logprobs.double())[loss_mask]
    ratio = log_ratio.exp()
    k3_sum, rho_sum, rho_square_sum, largest = torch.stack(
        ((ratio - log_ratio - 1.0).sum(), ratio.sum(), ratio.square().sum(), log_ratio.abs().max())
    ).tolist()
    if not math.isfinite(rho_square_sum) and not bool(generator_logprobs.isfinite().all()):
        raise ContractViolation("log-probs must be finite", field="generator_logprobs")
    return Mismatch(
        num_tokens=log_ratio.numel(), k3_sum=k3_sum, largest=largest, rho_sum=rho_sum, rho_square_sum=rho_square_sum
    )


def iteration_scaling(batches: Sequence[MicroBatchStats], algorithm: AlgorithmSpec) -> Scaling:
    """Computes what only the whole iteration knows; at least one batch, in any order."""
    counts = {
        "completions": sum(len(stats.rewards) for stats in batches),
        "tokens": sum(stats.num_tokens for stats in batches),
        "batches": len(batches),
    }
    advantages = [advantage for stats in batches for advantage in stats.advantages]
    late = ADVANTAGES[algorithm.advantage].late(advantages, algorithm.advantage_epsilon)
    return Scaling(
        count=counts[policy_loss(algorithm).normaliser.counts], baseline=late.baseline, deviation=late.deviation
    )


def iteration_numbers(batches: Iterable[MicroBatchStats], *, scaling: Scaling) -> IterationNumbers:
    """Makes the numbers of the whole iteration; at least one batch, in any order. scaling: of `iteration_scaling`."""
    ordered = sorted(batches, key=lambda stats: stats.batch_id)
    mismatches = [stats.mismatch for stats in ordered]
    rewards = [reward for stats in ordered for reward in stats.rewards]
    num_completions = len(rewards)
    num_tokens = sum(stats.num_tokens for stats in ordered)
    seen_tokens = sum(mismatch.num_tokens for mismatch in mismatches)
    names = sorted({name for stats in ordered for name in stats.component_sums})
    reward_mean = math.fsum(rewards) / num_completions
    raw = [advantage for stats in ordered for advantage in stats.advantages]
    advantages = [(advantage - scaling.baseline) / scaling.deviation for advantage in raw]
    advantage_mean = math.fsum(advantages) / max(1, len(advantages))
    num_low = sum(stats.num_clipped_low for stats in ordered)
    num_high = sum(stats.num_clipped_high for stats in ordered)
    measured = sum(stats.num_entropy_tokens for stats in ordered)
    return IterationNumbers(
        num_batches=len(ordered),
        num_completions=num_completions,
        num_tokens=num_tokens,
        reward_mean=reward_mean,
        reward_std=_unbiased_std(rewards, reward_mean),
        reward_components={
            name: math.fsum(stats.component_sums.get(name, 0.0) for stats in ordered) / num_completions
            for name in names
        },
        zero_advantage_share=sum(s.num_equal_groups for s in ordered) / sum(s.num_groups for s in ordered),
        num_resamples=sum(stats.num_resamples for stats in ordered),
        advantage_mean=advantage_mean,
        advantage_std=_unbiased_std(advantages, advantage_mean),
        advantage_max=max(map(abs, advantages), default=0.0),
        response_tokens_mean=num_tokens / num_completions,
        response_tokens_max=max(stats.longest_response_tokens for stats in ordered),
        truncated_share=sum(stats.num_truncated for stats in ordered) / num_completions,
        loss=math.fsum(stats.loss_sum - scaling.baseline * stats.baseline_loss_sum for stats in ordered)
        / scaling.divisor,
        clip_share=_share(num_low + num_high, num_tokens),
        clip_low_share=_share(num_low, num_tokens),
        clip_high_share=_share(num_high, num_tokens),
        kl_to_reference=_share(math.fsum(stats.k3_sum for stats in ordered), seen_tokens),
        kl_to_teacher=_share(math.fsum(stats.teacher_k3_sum for stats in ordered), seen_tokens)
        if any(stats.has_teacher for stats in ordered)
        else None,
        entropy=math.fsum(stats.surprise_sum for stats in ordered) / num_tokens,
        entropy_trained_tokens=math.fsum(stats.entropy_sum for stats in ordered) / measured if measured else None,
        corrected_share=_share(sum(stats.num_corrected for stats in ordered), seen_tokens),
        **trainer_generator_gap(mismatches),
    )


def counts_by_lag(batches: Iterable[MicroBatchStats], *, max_policy_lag: int) -> tuple[int, ...]:
    """Counts the batches by their lag, from 0 to max_policy_lag; () in a job without one."""
    counts = Counter(stats.lag for stats in batches)
    return tuple(counts[lag] for lag in range(max_policy_lag + 1)) if max_policy_lag else ()


def trainer_generator_gap(mismatches: Sequence[Mismatch]) -> dict[str, float]:
    """Returns mismatch_k3, mismatch_max and effective_sample_share over micro-batches in any order; at least one."""
    num_tokens = sum(mismatch.num_tokens for mismatch in mismatches)
    rho_sum = math.fsum(mismatch.rho_sum for mismatch in mismatches)
    rho_square_sum = math.fsum(mismatch.rho_square_sum for mismatch in mismatches)
    return {
        "mismatch_k3": _share(math.fsum(mismatch.k3_sum for mismatch in mismatches), num_tokens),
        "mismatch_max": max(mismatch.largest for mismatch in mismatches),
        # Kish's effective sample size: the share of the tokens that would tell as much if all weighed the same.
        "effective_sample_share": rho_sum**2 / (num_tokens * rho_square_sum) if num_tokens else 1.0,
    }


def mean_over_updates(numbers: Sequence[IterationNumbers], *, can_clip: Sequence[bool]) -> IterationNumbers:
    """Makes the numbers of the iteration from those of each update; clips are averaged over those that can clip."""
    clipping = [of_one for of_one, clips in zip(numbers, can_clip, strict=True) if clips]
    means = {name: _mean(numbers, name) for name in OF_ONE_UPDATE}
    means |= {name: _mean(clipping, name) or 0.0 for name in OF_A_CLIPPING_UPDATE}
    return replace(numbers[0], **means)  # pyright: ignore[reportArgumentType]


def _mean(numbers: Sequence[IterationNumbers], name: str) -> float | None:
    """Returns the mean of one number; None where there are no updates, or one of them doesn't have it."""
    values = [getattr(of_one, name) for of_one in numbers]
    return None if not values or None in values else math.fsum(values) / len(values)


def _unbiased_std(values: Sequence[float], mean: float) -> float:
    if len(values) < 2:
        return 0.0
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
