"""An open iteration as its trainer sees it: the expected batches, the batches that have come, and their numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from broker.trainer_side import Arrived
from consumer.gradient import statistics
from consumer.gradient.learner import Trained
from consumer.gradient.terms.base import LossTerm
from contracts.events import IterationMetrics, TimelineSpan, UpdateMetrics
from contracts.rollouts import RolloutBatch
from contracts.timeline import TRAINER, WAIT
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.window import AskedIteration

SAME_WAIT_S = 0.01
"""A wait is a row of looks: so little time lies between two of them."""
Numbers = tuple[statistics.IterationNumbers, list[statistics.IterationNumbers]]
"""The numbers of a whole iteration, and those of each of its updates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """The times between the end of one iteration and the beginning of the next; Unix times.

    `Commits.commit` creates it, and the next iteration measures its bubble with it.
    """

    last_token_s: float
    """The end of the last generation for training."""
    generations: tuple[tuple[float, float], ...] = ()
    """Start and end of the generations that ended later: evaluations, which fill what would be a pause."""
    opening_started_s: float
    """The time when the next version was announced, with the report, the commit and the opening still to come."""
    opened_s: float


class Iteration(ExpectedIteration):
    """An iteration with the numbers and the times that were measured while its batches came.

    `run_iterations` creates it, gathering and steps add to it, and the commit reads its report.
    """

    def __init__(self, iteration: AskedIteration, *, trainer_epoch: int, boundary: Boundary | None = None) -> None:
        """Starts without batches.

        Args:
            iteration: The batches that are expected, and the versions that may sample them.
            trainer_epoch: The epoch of the trainer.
            boundary: The times between the iteration before and this one; None for a trainer's first.
        """
        super().__init__(iteration)
        self.stats: list[statistics.BatchStats] = []
        self.spans: list[TimelineSpan] = []
        self.waiting_s = 0.0
        """Seconds that the trainer had nothing to train."""
        self._trainer_epoch = trainer_epoch
        self._boundary = boundary
        self._generation_s = 0.0
        self._started_s = time.time()
        if boundary is not None:
            self._add_span(TRAINER, "open", started_s=boundary.opening_started_s, ended_s=boundary.opened_s)

    def take(self, arrived: Arrived) -> bool:
        is_first = super().take(arrived)
        if is_first:
            self._record_generation(arrived.batch)
        return is_first

    def record(self, *batches: Trained) -> None:
        """Books batches that went into the gradient."""
        for trained in batches:
            self.stats.append(trained.stats)
            self.record_span(trained)

    def record_span(self, trained: Trained) -> None:
        """Books when a batch was trained; each update of the iteration trains it once."""
        who = TRAINER
        if trained.rank:
            who = f"{TRAINER} {trained.rank}"
        self._add_span(
            who, "train", batch_id=trained.stats.batch_id, started_s=trained.started_s, ended_s=trained.ended_s
        )

    def waited(self, seconds: float) -> None:
        """Books that there was nothing to train until now; a wait that follows another at once goes on with it."""
        self.waiting_s += seconds
        now_s = time.time()
        started_s = now_s - seconds
        if self.spans:
            last = self.spans[-1]
            if last.what == WAIT and started_s - last.ended_s < SAME_WAIT_S:
                self.spans[-1] = replace(last, ended_s=now_s)
                return
        self._add_span(TRAINER, WAIT, started_s=started_s, ended_s=now_s)

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Times a piece of the trainer's own work."""
        started_s = time.time()
        yield
        self._add_span(TRAINER, what, started_s=started_s, ended_s=time.time())

    def seconds(self, what: str) -> float:
        """Sums the trainer's spans of one kind over its ranks."""
        return sum(s.ended_s - s.started_s for s in self.spans if s.who.startswith(TRAINER) and s.what == what)

    @property
    def last_token_s(self) -> float:
        """Unix time at which the last generation for training ended, of those that came."""
        return max((ended_s for _, ended_s in self._training_generations), default=self._started_s)

    @property
    def later_generations(self) -> tuple[tuple[float, float], ...]:
        """Start and end of each generation, of this iteration or one before, that ended after last_token_s."""
        generations = list(self._generations)
        if self._boundary is not None:
            generations = [*self._boundary.generations, *generations]
        return tuple(generation for generation in generations if generation[1] > self.last_token_s)

    @property
    def bubble_s(self) -> float:
        """Seconds in which no generator sampled between the iteration before and this one; 0.0 in a trainer's first.

        Under a lag this iteration was begun before that one was trained.
        """
        if self._boundary is None or not self._generations:
            return 0.0
        first_s = min(started_s for started_s, _ in self._training_generations)
        return uncovered_s(self._boundary.last_token_s, first_s, (*self._boundary.generations, *self._generations))

    @property
    def _generations(self) -> list[tuple[float, float]]:
        return [(span.started_s, span.ended_s) for span in self.spans if span.what == "generate"]

    @property
    def _training_generations(self) -> list[tuple[float, float]]:
        """The generations of its training batches; all generations, where it only evaluates."""
        training = [
            (span.started_s, span.ended_s)
            for span in self.spans
            if span.what == "generate" and span.batch_id in self._sampler
        ]
        return training or self._generations

    def numbers(
        self, updates: Sequence[statistics.Update], *, scaling: statistics.Scaling, terms: Sequence[LossTerm]
    ) -> Numbers:
        """Returns the numbers of a training iteration whose batches are all in, and those of each update.

        Args:
            updates: The optimizer steps in order, at least one.
            scaling: The iteration's.
            terms: The terms of the job's loss.
        """
        of_each = [
            statistics.iteration_numbers(update.stats, scaling=update.scaling, terms=terms) for update in updates
        ]
        whole = statistics.iteration_numbers(self.stats, scaling=scaling, terms=terms)
        return statistics.mean_over_updates(whole, of_each, terms=terms), of_each

    def metrics(
        self,
        updates: Sequence[statistics.Update],
        numbers_of: Numbers,
        *,
        learning_rate: float,
        peak_flops: float = 0.0,
        max_policy_lag: int = 0,
    ) -> IterationMetrics:
        """Makes the report of a trained iteration.

        Args:
            updates: The optimizer steps, in order.
            numbers_of: As `numbers` has them, of the same updates.
            learning_rate: Of these steps.
            peak_flops: Floating-point operations a second of one rank, or 0.0 where they are unknown.
            max_policy_lag: Of the spec.
        """
        numbers, of_each = numbers_of
        wall_s = time.time() - self._started_s
        training_s = self.seconds("train")
        # A step on batches as they came has the same objects, whose cost counts once; a batch that was trained again
        # has numbers of its own.
        passes = {id(stats): stats for stats in self.stats}
        for update in updates:
            passes |= {id(stats): stats for stats in update.stats}
        costs = [stats.cost for stats in passes.values()]
        trained_tokens = sum(cost.num_tokens for cost in costs)
        flops = _total(cost.flops for cost in costs)
        return IterationMetrics(
            iteration=self.number,
            policy_version=self.policy_version,
            trainer_epoch=self._trainer_epoch,
            grad_norm=math.fsum(update.grad_norm for update in updates) / len(updates),
            learning_rate=learning_rate,
            started_s=self._started_s,
            wall_s=wall_s,
            generation_s=self._generation_s,
            training_s=training_s,
            waiting_s=self.waiting_s,
            step_s=self.seconds("step"),
            publish_s=self.seconds("sync"),
            bubble_s=self.bubble_s,
            tokens_per_s=numbers.num_tokens / wall_s,
            trained_tokens=trained_tokens,
            trained_tokens_per_s=trained_tokens / training_s if training_s else 0.0,
            mfu=flops / (training_s * peak_flops) if flops is not None and training_s and peak_flops else None,
            num_unscorable=self.num_unscorable,
            lag_counts=statistics.counts_by_lag(self.stats, max_policy_lag=max_policy_lag),
            lag_mean=sum(stats.lag for stats in self.stats) / len(self.stats),
            updates=_each_update(of_each, updates) if len(updates) > 1 else (),
            trajectories=self.played.metrics(),
            difficulty_pools=self.pool_shares or UNSET,
            **dataclasses.asdict(numbers),
        )

    def _record_generation(self, batch: RolloutBatch) -> None:
        for timings in batch.rounds:
            self._generation_s += timings.generation_ended_s - timings.generation_started_s
            spans = (
                ("generate", timings.generation_started_s, timings.generation_ended_s),
                ("score", timings.scoring_started_s, timings.scoring_ended_s),
            )
            for what, started_s, ended_s in spans:
                self._add_span(batch.generator_id, what, batch_id=batch.batch_id, started_s=started_s, ended_s=ended_s)

    def _add_span(self, who: str, what: str, *, batch_id: str = "", started_s: float, ended_s: float) -> None:
        self.spans.append(
            TimelineSpan(
                who=who, what=what, iteration=self.number, batch_id=batch_id, started_s=started_s, ended_s=ended_s
            )
        )


def uncovered_s(since_s: float, until_s: float, spans: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds from since_s to until_s that lie in none of the spans, which are (start, end)."""
    idle_s = 0.0
    covered_until_s = since_s
    for started_s, ended_s in sorted(spans):
        idle_s += max(0.0, min(started_s, until_s) - covered_until_s)
        covered_until_s = max(covered_until_s, ended_s)
    return idle_s + max(0.0, until_s - covered_until_s)


def _total(flops: Iterable[float | None]) -> float | None:
    """Adds floating-point operations; None where those of a batch are unknown."""
    known: list[float] = []
    for number in flops:
        if number is None:
            return None
        known.append(number)
    return math.fsum(known)


def _each_update(
    numbers: Sequence[statistics.IterationNumbers], updates: Sequence[statistics.Update]
) -> tuple[UpdateMetrics, ...]:
    """Returns the numbers of each update under the names that the iteration's have."""
    return tuple(
        UpdateMetrics(loss=of_update.loss, grad_norm=update.grad_norm, loss_metrics=of_update.loss_metrics)
        for of_update, update in zip(numbers, updates, strict=True)
    )
