"""Numbers of an iteration that its sampled batches give: each is declared with the function that computes it.

    batch ─ SampledStats.of ─▶ its part ─ number(…) ─▶ the iteration's ─▶ IterationMetrics, under the same name

`math.fsum` rounds once, in any order of the batches (I7).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from contracts.errors import ContractViolation
from contracts.events import TrajectoryMetrics
from contracts.rollouts import RolloutBatch, Trajectory


@dataclass(frozen=True, kw_only=True)
class SampledStats:
    """A rollout batch's part in the numbers of its iteration, before any forward pass."""

    batch_id: str
    rewards: tuple[float, ...]
    """The reward of every completion, before any shuffling."""
    component_scores: dict[str, tuple[float, ...]]
    """The unweighted scores of each component, over the completions that it scores."""
    source_rewards: dict[str, tuple[float, ...]]
    """The rewards by source, in a mixture of data sets."""
    num_groups: int
    num_equal_groups: int
    """Groups of zero advantage."""
    num_resamples: int
    """Groups that were dropped for these."""
    num_tokens: int
    """Sampled tokens."""
    longest_response_tokens: int
    num_truncated: int
    """Completions that were cut before they had ended."""
    lag: int = 0
    """Iteration - version that sampled."""
    surprise_sum: float = 0.0
    """Sum of -generator_logprobs over the sampled tokens, in nats."""

    @classmethod
    def of(cls, batch: RolloutBatch, rewards: NDArray[np.float64]) -> Self:
        """Measures a batch. rewards: [k, G], as sampled.

        Raises ContractViolation where the generator's log-probs are not finite.
        """
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        lengths = [rollout.completion.num_sampled for rollout in rollouts]
        logprobs = b"".join(rollout.completion.generator_logprobs for rollout in rollouts)
        total = float(np.frombuffer(logprobs, dtype="<f4").sum(dtype=np.float64))
        if not math.isfinite(total):
            raise ContractViolation("log-probs must be finite", field="generator_logprobs")
        return cls(
            batch_id=batch.batch_id,
            rewards=tuple(rewards.reshape(-1).tolist()),
            component_scores=by_name(item for rollout in rollouts for item in rollout.reward_breakdown.items()),
            source_rewards=by_name(
                (group.source, reward)
                for group, of_group in zip(batch.groups, rewards.tolist(), strict=True)
                for reward in of_group
                if group.source is not UNSET
            ),
            num_groups=len(batch.groups),
            num_equal_groups=int(equal_groups(rewards).sum()) if rewards.shape[1] > 1 else 0,
            num_resamples=sum(group.num_resamples for group in batch.groups),
            num_tokens=sum(lengths),
            longest_response_tokens=max(lengths),
            num_truncated=sum(rollout.completion.is_truncated for rollout in rollouts),
            lag=batch.iteration - batch.policy_version,
            # The surprise of a sampled token is -log mu: its mean estimates the entropy of the generator.
            surprise_sum=-total,
        )


S = TypeVar("S", bound=SampledStats)


class BatchesOf(Generic[S]):
    """The batches of an iteration, at least one, in the order of their ids."""

    def __init__(self, stats: Iterable[S]) -> None:
        self.ordered: list[S] = sorted(stats, key=lambda of_batch: of_batch.batch_id)

    def sum(self, name: str) -> Any:
        """Adds up one of their numbers; whole ones stay whole."""
        values = [getattr(stats, name) for stats in self.ordered]
        if all(isinstance(value, int) for value in values):
            return sum(values)
        return math.fsum(values)

    @cached_property
    def rewards(self) -> list[float]:
        return [reward for stats in self.ordered for reward in stats.rewards]

    def means(self, name: str) -> dict[str, float]:
        """The mean of each of what one of their tables has."""
        tables: list[dict[str, tuple[float, ...]]] = [getattr(stats, name) for stats in self.ordered]
        values = by_name((key, value) for table in tables for key, of_key in table.items() for value in of_key)
        return {key: mean(list(of_key)) for key, of_key in sorted(values.items())}


def by_name(items: Iterable[tuple[str, float]]) -> dict[str, tuple[float, ...]]:
    """Gathers the values of each name."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in items:
        values[name].append(value)
    return {name: tuple(of_name) for name, of_name in values.items()}


def number(of: Callable[[Any], object], **metadata: object) -> Any:
    """Declares a number with its reduction. of: `BatchesOf` the iteration → its value."""
    return field(metadata={"of": of, **metadata})


@dataclass(frozen=True, kw_only=True)
class SampledNumbers:
    """The fields of IterationMetrics that are of the rollouts, under the same names."""

    num_batches: int = number(lambda its: len(its.ordered))
    num_completions: int = number(lambda its: len(its.rewards))
    num_tokens: int = number(lambda its: its.sum("num_tokens"))
    reward_mean: float = number(lambda its: mean(its.rewards))
    reward_std: float = number(lambda its: unbiased_std(its.rewards))
    reward_components: dict[str, float] = number(lambda its: its.means("component_scores"))
    source_rewards: dict[str, float] | UnsetType = number(lambda its: its.means("source_rewards") or UNSET)
    zero_advantage_share: float = number(lambda its: its.sum("num_equal_groups") / its.sum("num_groups"))
    num_resamples: int = number(lambda its: its.sum("num_resamples"))
    response_tokens_mean: float = number(lambda its: its.sum("num_tokens") / len(its.rewards))
    response_tokens_max: int = number(lambda its: max(stats.longest_response_tokens for stats in its.ordered))
    truncated_share: float = number(lambda its: its.sum("num_truncated") / len(its.rewards))
    entropy: float = number(lambda its: its.sum("surprise_sum") / its.sum("num_tokens"))


Numbers = TypeVar("Numbers", bound=SampledNumbers)


def numbers_of(kind: type[Numbers], batches: BatchesOf[Any]) -> Numbers:
    """Makes each number that `kind` declares."""
    return kind(**{declared.name: declared.metadata["of"](batches) for declared in fields(kind)})


class PlayedTrajectories:
    """Trajectories of the training batches, and their numbers; a job without an environment has none."""

    def __init__(self) -> None:
        self._played: list[Trajectory] = []
        self._num_observed = self._num_lines = 0
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, batch: RolloutBatch) -> None:
        for group in batch.groups:
            for completion in (rollout.completion for rollout in group.rollouts):
                trajectory = completion.trajectory
                if trajectory is UNSET:
                    continue
                self._played.append(trajectory)
                self._num_observed += completion.num_tokens - completion.num_sampled
                self._num_lines += len(completion.lines)
                for name, value in trajectory.metrics.items():
                    self._metrics[f"{group.source}/{name}" if group.source else name].append(value)

    def metrics(self) -> TrajectoryMetrics | UnsetType:
        """Returns the numbers of the iteration; UNSET where nothing was played."""
        size = len(self._played)
        if not size:
            return UNSET
        num_turns = [len(trajectory.turns) for trajectory in self._played]
        stops = Counter(trajectory.stop for trajectory in self._played)
        return TrajectoryMetrics(
            turns_mean=sum(num_turns) / size,
            turns_max=max(num_turns),
            done_share=stops["done"] / size,
            max_turns_share=stops["max_turns"] / size,
            max_tokens_share=stops["max_tokens"] / size,
            failed_share=stops["failed"] / size,
            observation_tokens_mean=self._num_observed / size,
            lines_mean=self._num_lines / size,
            environment_reward_mean=math.fsum(trajectory.reward for trajectory in self._played) / size,
            num_begun_again=sum(trajectory.attempt > 1 for trajectory in self._played),
            environment={name: math.fsum(values) / len(values) for name, values in sorted(self._metrics.items())},
        )


def equal_groups(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [k]: groups whose rewards are all equal; they teach nothing."""
    return rewards.max(axis=1) == rewards.min(axis=1)


def mean(values: Sequence[float]) -> float:
    """0.0 of none."""
    return math.fsum(values) / max(1, len(values))


def unbiased_std(values: Sequence[float]) -> float:
    """0.0 of fewer than two."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
