"""What an environment gave in an iteration, as numbers: sums over the trajectories of its training batches.

Every trainer takes its batches through `ExpectedIteration`, which adds them here; a job without an environment adds
none, and has no such numbers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from msgspec import UNSET, UnsetType

from contracts.events import TrajectoryMetrics
from contracts.rollouts import Completion, RolloutBatch, StopReason


class PlayedTrajectories:
    """Sums over trajectories; `math.fsum` rounds once, so they don't depend on the order of arrival (I7)."""

    def __init__(self) -> None:
        self._num_turns: list[int] = []
        self._num_observed = 0
        self._num_begun_again = 0
        self._stops: Counter[StopReason] = Counter()
        self._rewards: list[float] = []
        self._metrics: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, batch: RolloutBatch) -> None:
        for group in batch.groups:
            for rollout in group.rollouts:
                self._add(rollout.completion)

    def metrics(self) -> TrajectoryMetrics | UnsetType:
        """Returns the numbers of the iteration; UNSET where nothing was played."""
        size = len(self._num_turns)
        if not size:
            return UNSET
        return TrajectoryMetrics(
            turns_mean=sum(self._num_turns) / size,
            turns_max=max(self._num_turns),
            done_share=self._stops["done"] / size,
            max_turns_share=self._stops["max_turns"] / size,
            max_tokens_share=self._stops["max_tokens"] / size,
            failed_share=self._stops["failed"] / size,
            observation_tokens_mean=self._num_observed / size,
            environment_reward_mean=math.fsum(self._rewards) / size,
            num_begun_again=self._num_begun_again,
            environment={name: math.fsum(values) / len(values) for name, values in sorted(self._metrics.items())},
        )

    def _add(self, completion: Completion) -> None:
        trajectory = completion.trajectory
        if trajectory is UNSET:
            return
        self._num_turns.append(len(trajectory.turns))
        self._num_observed += completion.num_tokens - completion.num_sampled
        self._num_begun_again += trajectory.attempt > 1
        self._stops[trajectory.stop] += 1
        self._rewards.append(trajectory.reward)
        for name, value in trajectory.metrics.items():
            self._metrics[name].append(value)
