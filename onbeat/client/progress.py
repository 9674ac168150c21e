"""The progress of a job as a follower knows it: a fold of its events and of the last status.

The fold is pure, so that a test can replay a job.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from contracts import events
from contracts.jobs import EvaluationScore, JobStatus

RECENT = 10
"""Iterations whose median time tells how long the rest will take."""


@dataclass
class JobProgress:
    """Mutable on purpose: one follower owns it."""

    status: JobStatus
    iterations: dict[int, events.IterationMetrics] = field(default_factory=dict)
    """By iteration; a replayed one replaces its first metrics."""
    evaluations: dict[int, EvaluationScore] = field(default_factory=dict)
    num_trainer_starts: int = 0
    newest_dead: events.BatchDead | None = None
    """The batch that was given up last; None while none was."""

    def apply(self, event: events.JobEvent) -> None:
        if isinstance(event, events.IterationCommitted):
            self.iterations[event.metrics.iteration] = event.metrics
        elif isinstance(event, events.EvaluationFinished):
            self.evaluations[event.score.iteration] = event.score
        elif isinstance(event, events.TrainerStarted):
            self.num_trainer_starts += 1
        elif isinstance(event, events.BatchDead):
            self.newest_dead = event

    @property
    def in_order(self) -> list[events.IterationMetrics]:
        return [self.iterations[iteration] for iteration in sorted(self.iterations)]

    @property
    def latest(self) -> events.IterationMetrics | None:
        return self.in_order[-1] if self.iterations else None

    @property
    def num_committed(self) -> int:
        return max(len(self.iterations), self.status.iterations_committed)

    @property
    def curve_name(self) -> str:
        """The number by which the job is judged first: `loss` where it learns given completions, else `reward`."""
        return "loss" if self.status.learns_given else "reward"

    @property
    def curve(self) -> list[float]:
        """The values of that number, one for each iteration, oldest first."""
        return [self.curve_value(metrics) for metrics in self.in_order]

    def curve_value(self, metrics: events.IterationMetrics) -> float:
        return metrics.loss if self.status.learns_given else metrics.reward_mean

    @property
    def evaluation_before(self) -> EvaluationScore | None:
        """The held-out score under version 0."""
        return self.evaluations.get(0) or self.status.evaluation_before

    @property
    def evaluation_latest(self) -> EvaluationScore | None:
        if self.evaluations:
            return self.evaluations[max(self.evaluations)]
        return self.status.evaluation_latest

    @property
    def left_s(self) -> float | None:
        """Estimates the seconds that are left; None before the first iteration, and once the job has ended."""
        if not self.iterations or self.status.state.is_final:
            return None
        typical_s = statistics.median(metrics.wall_s for metrics in self.in_order[-RECENT:])
        return typical_s * max(0, self.status.iterations - self.num_committed)
