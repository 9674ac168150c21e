"""One open iteration as its trainer sees it: what was expected, what has come, what it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from broker.trainer_side import Arrived
from consumer.gradient.learner import Trained
from consumer.gradient.statistics import (
    IterationNumbers,
    MicroBatchStats,
    Scaling,
    Update,
    counts_by_lag,
    iteration_numbers,
    mean_over_updates,
)
from consumer.trainer.window import AskedIteration
from contracts.errors import FenceViolation
from contracts.events import IterationMetrics, SampledBy, TimelineSpan, UpdateMetrics
from contracts.rollouts import PromptBatch, RolloutBatch, RolloutGroup

TRAINER = "trainer"
"""`who` of the spans of the trainer's rank 0; those of rank 1 are of `trainer 1`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary:
    """Where one iteration ended and the next began; Unix times."""

    last_token_s: float
    """The end of the last generation for training."""
    generations: tuple[tuple[float, float], ...] = ()
    """Start and end of those that ended later: evaluations, which fill what would be a pause."""
    opening_started_s: float
    """The next version is announced; what is left is to report, to commit and to open."""
    opened_s: float


class Iteration:
    """Takes each expected batch once, in any order; the rest of the iteration is read off it."""

    def __init__(self, asked: AskedIteration, *, trainer_epoch: int, boundary: Boundary | None = None) -> None:
        """boundary: the times between the iteration before and this one; None for a trainer's first."""
        self.number = self.policy_version = asked.number
        self.weights_digest = asked.weights_digest
        self._asked = asked
        self._sampler: dict[str, int] = {}
        """Training batch that was taken → the version that sampled it."""
        self.expected: dict[str, PromptBatch] = {batch.batch_id: batch for batch in asked.batches}
        self._missing = dict(self.expected)
        self.digests: dict[str, str] = {}
        """Batch id → digest of every batch that was taken."""
        self.abandoned: dict[str, str] = {}
        """Batch id → reason."""
        self.evaluation: dict[str, RolloutBatch] = {}
        self.unscorable: dict[str, dict[str, int]] = {}
        """Batch id → "component: reason" → completions that got an `on_unscorable` score."""
        self.num_unscorable = 0
        """Trained completions that got one."""
        self.stats: list[MicroBatchStats] = []
        self.spans: list[TimelineSpan] = []
        self.waiting_s = 0.0
        """Seconds that the trainer had nothing to train."""
        self._trainer_epoch = trainer_epoch
        self._boundary = boundary
        self._generation_s = 0.0
        self._started_s = time.time()
        if boundary is not None:
            self._add_span(TRAINER, "open", started_s=boundary.opening_started_s, ended_s=boundary.opened_s)

    @property
    def missing(self) -> list[PromptBatch]:
        """Neither taken nor abandoned, in the order of dispatch."""
        return list(self._missing.values())

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def missing_in_words(self) -> str:
        """`3 of 9 batches of iteration 4 (4/train/1, 4/train/2, …)`"""
        some = ", ".join(itertools.islice(self._missing, 3)) + (", …" if len(self._missing) > 3 else "")
        return f"{len(self._missing)} of {len(self.expected)} batches of iteration {self.number} ({some})"

    def take(self, arrived: Arrived) -> bool:
        """Returns whether it is the first copy of this batch. Raises FenceViolation for one of another iteration.

        The fence checked the same at publication; before a gradient it is checked again (I2, I3).
        """
        batch = arrived.batch
        self._check(batch)
        known = self.digests.get(batch.batch_id)
        if known is not None and known != arrived.digest:
            raise FenceViolation(f"batch {batch.batch_id} came twice, with different content", field="digest")
        if known is not None or batch.batch_id in self.abandoned:
            return False
        self.digests[batch.batch_id] = arrived.digest
        del self._missing[batch.batch_id]
        self._record_generation(batch)
        self._record_unscorable(batch)
        if batch.purpose == "evaluation":
            self.evaluation[batch.batch_id] = batch
        else:
            self._sampler[batch.batch_id] = batch.policy_version
        return True

    @property
    def sampled(self) -> tuple[SampledBy, ...]:
        """The training batches that older versions sampled, oldest version first."""
        older = sorted(set(self._sampler.values()) - {self.number})
        return tuple(
            SampledBy(
                policy_version=version,
                weights_digest=self._asked.samplers[version],
                batches=tuple(sorted(batch_id for batch_id, by in self._sampler.items() if by == version)),
            )
            for version in older
        )

    def record(self, *batches: Trained) -> None:
        """Books batches that went into the gradient."""
        for trained in batches:
            self.stats.append(trained.stats)
            self.record_span(trained)

    def record_span(self, trained: Trained) -> None:
        """Books when a batch was trained; each update of the iteration trains it once."""
        who = f"{TRAINER} {trained.rank}" if trained.rank else TRAINER
        self._add_span(
            who, "train", batch_id=trained.stats.batch_id, started_s=trained.started_s, ended_s=trained.ended_s
        )

    def abandon(self, dead: Mapping[str, str]) -> dict[str, str]:
        """Gives up dead batches, and returns those that it did not know to be dead."""
        new = {batch_id: reason for batch_id, reason in dead.items() if batch_id not in self.abandoned}
        self.abandoned |= new
        for batch_id in new:
            self._missing.pop(batch_id, None)
        return new

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
        known = (*(self._boundary.generations if self._boundary else ()), *self._generations)
        return tuple(one for one in known if one[1] > self.last_token_s)

    @property
    def bubble_s(self) -> float:
        """How long no generator sampled between the iteration before and this one; 0.0 where there is none before.

        Under a lag this one was begun before that one was trained.
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
        """Those of its training batches; all, where it only evaluates."""
        training = [
            (span.started_s, span.ended_s)
            for span in self.spans
            if span.what == "generate" and span.batch_id in self._sampler
        ]
        return training or self._generations

    def metrics(
        self,
        updates: Sequence[Update],
        *,
        learning_rate: float,
        scaling: Scaling,
        peak_flops: float = 0.0,
        max_policy_lag: int = 0,
    ) -> IterationMetrics:
        """The numbers of a training iteration whose batches are all in; updates: at least one, in order.

        peak_flops: floating-point operations a second of one rank, or 0.0 where they are unknown. max_policy_lag: of
        the spec.
        """
        of_each = [iteration_numbers(update.stats, scaling=scaling) for update in updates]
        numbers = mean_over_updates(of_each, can_clip=[any(one.can_clip for one in update.stats) for update in updates])
        wall_s = time.time() - self._started_s
        training_s = self.seconds("train")
        costs = [stats.cost for update in updates for stats in update.stats]
        trained_tokens = sum(cost.num_tokens for cost in costs)
        flops = math.fsum(cost.flops for cost in costs)
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
            publish_s=self.seconds("publish"),
            bubble_s=self.bubble_s,
            tokens_per_s=numbers.num_tokens / wall_s,
            trained_tokens=trained_tokens,
            trained_tokens_per_s=trained_tokens / training_s if training_s else 0.0,
            mfu=flops / (training_s * peak_flops) if training_s and peak_flops else None,
            num_unscorable=self.num_unscorable,
            lag_counts=counts_by_lag(self.stats, max_policy_lag=max_policy_lag),
            lag_mean=sum(stats.lag for stats in self.stats) / len(self.stats),
            updates=_each_update(of_each, updates) if len(updates) > 1 else (),
            **dataclasses.asdict(numbers),
        )

    def _check(self, batch: RolloutBatch) -> None:
        expected = self.expected.get(batch.batch_id)
        if expected is None:
            raise FenceViolation(f"batch {batch.batch_id} is not of iteration {self.number}", field="batch_id")
        allowed = self._asked.samplers if expected.purpose == "train" else {self.number: self.weights_digest}
        if allowed.get(batch.policy_version) != batch.weights_digest:
            may = ", ".join(f"{version} ({digest[:12]})" for version, digest in sorted(allowed.items()))
            raise FenceViolation(
                f"batch {batch.batch_id} was sampled with version {batch.policy_version} "
                f"({batch.weights_digest[:12]}), what samples it is version {may}",
                field="policy_version",
            )
        asked_for = (expected.purpose, expected.group_size, len(expected.prompts))
        if (batch.purpose, batch.group_size, len(batch.groups)) != asked_for:
            raise FenceViolation(f"batch {batch.batch_id} has another shape than it was asked for", field="groups")
        for place, group in enumerate(batch.groups):
            _check_group(group, place, expected)

    def _record_unscorable(self, batch: RolloutBatch) -> None:
        replaced = [rollout.unscorable for group in batch.groups for rollout in group.rollouts if rollout.unscorable]
        if not replaced:
            return
        counts = Counter(f"{name}: {reason}" for one in replaced for name, reason in one.items())
        self.unscorable[batch.batch_id] = dict(sorted(counts.items()))
        self.num_unscorable += len(replaced) if batch.purpose == "train" else 0

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
    idle_s, covered_until_s = 0.0, since_s
    for started_s, ended_s in sorted(spans):
        idle_s += max(0.0, min(started_s, until_s) - covered_until_s)
        covered_until_s = max(covered_until_s, ended_s)
    return idle_s + max(0.0, until_s - covered_until_s)


def _check_group(group: RolloutGroup, place: int, expected: PromptBatch) -> None:
    """Raises FenceViolation unless the place holds its prompt after so many resamples, and was due no further one."""
    asked = expected.prompt_at(place, num_resamples=group.num_resamples)
    answered = (group.prompt_id, group.prompt_index, group.prompt_token_ids)
    if asked is None or answered != (asked.prompt_id, asked.index, asked.token_ids):
        raise FenceViolation(
            f"batch {expected.batch_id} answers {group.prompt_id} at place {place} after {group.num_resamples} "
            f"resamples, it was asked {asked.prompt_id if asked else 'nothing'} there",
            field="groups",
        )
    if group.has_equal_rewards and group.num_resamples < len(expected.reserves):
        raise FenceViolation(
            f"batch {expected.batch_id} kept the equal rewards of {group.prompt_id}, though place {place} was due "
            "another prompt",
            field="groups",
        )


def _each_update(numbers: Sequence[IterationNumbers], updates: Sequence[Update]) -> tuple[UpdateMetrics, ...]:
    return tuple(
        UpdateMetrics(
            loss=of_one.loss,
            clip_share=of_one.clip_share,
            kl_to_reference=of_one.kl_to_reference,
            grad_norm=update.grad_norm,
        )
        for of_one, update in zip(numbers, updates, strict=True)
    )
