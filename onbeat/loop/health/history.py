"""The history that the rules look at: the newest iterations, the first ones, and the best sure reward. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque

from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.spec.job import JobSpec

WINDOW = 10
"""Iterations over which a rule averages: what lasts so long is no noise."""
SURE = 4.0
"""Standard errors that a fall is deep."""
LOST = 0.5
"""Share of what there was that a fall loses."""
NUM_FIRST = 3
"""Iterations that say how a job began: more would have a collapse among them."""


class History:
    """The iterations of one job so far, in order: a fold of its metrics and held-out scores."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.recent: deque[IterationMetrics] = deque(maxlen=WINDOW)
        self.first: list[IterationMetrics] = []
        self.before: tuple[float, int] | None = None
        """(reward, iteration) of the best that was sure before the newest WINDOW iterations."""
        self.best_score: EvaluationScore | None = None
        self.score: EvaluationScore | None = None
        """The newest one."""
        self._bound = -math.inf
        self._largest_std = 0.0
        self._means: deque[float] = deque(maxlen=WINDOW)
        """The mean reward over the WINDOW iterations up to each of the newest; NaN where there are fewer."""

    def add(self, metrics: IterationMetrics) -> None:
        self._largest_std = max(self._largest_std, metrics.reward_std)
        if len(self.recent) == WINDOW:
            # One iteration, whose error is large, and a mean over many, whose error is small.
            self._leave(self.recent[0], self.recent[0].reward_mean, num_iterations=1)
            self._leave(self.recent[0], self._means[0], num_iterations=WINDOW)
        self.recent.append(metrics)
        self._means.append(self.mean("reward_mean") if self.is_full else math.nan)
        if len(self.first) < NUM_FIRST:
            self.first.append(metrics)

    def add_score(self, score: EvaluationScore) -> None:
        self.score = score
        if self.best_score is None or score.sampled > self.best_score.sampled:
            self.best_score = score

    @property
    def is_full(self) -> bool:
        return len(self.recent) == WINDOW

    def has(self, num_iterations: int) -> bool:
        """True where there are so many iterations, or all that a shorter job has."""
        return len(self.recent) >= min(num_iterations, self.spec.iterations)

    def share(self, name: str) -> float:
        """Returns a number of completions as a share of all completions of the newest iterations."""
        counted = sum(getattr(metrics, name) for metrics in self.recent)
        return counted / sum(metrics.num_completions for metrics in self.recent)

    def median(self, name: str) -> float:
        """Over the newest iterations: what is so in one of them alone doesn't show."""
        return statistics.median(getattr(metrics, name) for metrics in self.recent)

    def mean(self, name: str) -> float:
        """Over the newest WINDOW iterations, or as many as there are."""
        return statistics.fmean(getattr(metrics, name) for metrics in self.recent)

    def loss_mean(self, name: str) -> float:
        """Returns the mean of a number of the loss over the newest WINDOW iterations; 0.0 where the job has none."""
        return statistics.fmean(metrics.loss_metrics.get(name, 0.0) for metrics in self.recent)

    def began(self, name: str) -> float:
        """The mean over the first iterations."""
        return statistics.fmean(getattr(metrics, name) for metrics in self.first)

    @property
    def has_collapsed(self) -> bool:
        """True where the reward has surely fallen, and lost half of what it was."""
        return self.is_full and self.mean("reward_mean") < self._bound

    @property
    def is_solved(self) -> bool:
        """True where the reward has risen and is nearly the same for every completion: nothing is left to learn."""
        now = self.mean("reward_mean")
        has_risen = now > self.first[0].reward_mean and not self.has_collapsed
        return has_risen and self.mean("reward_std") < 0.1 * abs(now)

    def bound_of(self, reward: float, num_groups: float) -> float:
        """Below it a mean over so many groups is surely less, and half is lost. Completions of a group are alike."""
        return reward - max(SURE * self._largest_std / math.sqrt(max(1.0, num_groups)), LOST * abs(reward))

    def _leave(self, metrics: IterationMetrics, reward: float, *, num_iterations: int) -> None:
        num_groups = num_iterations * metrics.num_completions / self.spec.rollout.group_size
        if (bound := self.bound_of(reward, num_groups)) > self._bound:
            self._bound, self.before = bound, (reward, metrics.iteration)
