"""The fence's rules over batches that are only counted: what is open, who may claim what, under which version.

    open 0 … K ─▶ claim, oldest iteration first ─▶ publish ─▶ commit t ─▶ open t + K + 1, evaluation of t + 1 goes out
                  └─ a new batch; else a copy of one that another is late with

Which versions sample an iteration, how many are open and which one a commit opens is `contracts.schedule`'s, as for the
trainer and the fence; `tests/extras/planning/test_planned_window.py` holds this window and the scripts
to the same answers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from contracts.schedule import Schedule
from contracts.spec import JobSpec

LATE = 1.5
"""After this many times the median of the latest ones a batch is copied (broker/scripts/claim_prompt.lua)."""
RECENT = 31
"""How many latest ones (broker/scripts/prelude.lua)."""

Purpose = Literal["train", "evaluation"]


@dataclass(kw_only=True, eq=False)
class Batch:
    """An expected batch of an open iteration."""

    iteration: int
    purpose: Purpose
    index: int
    version: int = -1
    """The version that samples it; -1 until it is claimed."""
    holder: int | None = None
    hedger: int | None = None
    claimed_s: float = 0.0
    is_published: bool = False

    @property
    def batch_id(self) -> str:
        return f"{self.iteration}/{self.purpose}/{self.index}"


@dataclass(kw_only=True)
class OpenIteration:
    """One slot of the window."""

    number: int
    oldest_version: int
    newest_version: int
    expected: int
    fresh: deque[Batch] = field(default_factory=deque)
    """Batches that wait for their first claim."""
    leased: list[Batch] = field(default_factory=list)
    """Claimed once and not published, the oldest claim first."""
    published: deque[Batch] = field(default_factory=deque)
    """Batches that the trainer has yet to take, in the order in which they came."""
    num_published: int = 0

    @property
    def is_published(self) -> bool:
        return self.num_published == self.expected


class Window:
    """The open iterations of one job. Time is the caller's: it is handed in."""

    def __init__(self, spec: JobSpec, schedule: Schedule) -> None:
        """schedule: in place of the spec's own, which may be another."""
        self._spec = spec
        self._schedule = schedule
        self._newest_version = -1
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self.open: dict[int, OpenIteration] = {}
        """By number, oldest first."""

    def start(self) -> None:
        """Opens what a job's start does: version 0 is there."""
        self._newest_version = 0
        for iteration in range(self._schedule.num_open):
            self._open(iteration)
        self._dispatch_evaluation(0)

    def claim(self, generator: int, held_version: int, now_s: float) -> Batch | None:
        """The next new batch, of the oldest iteration that has one, under the version that it must be sampled with."""
        for slot in self.open.values():
            if slot.fresh:
                batch = slot.fresh.popleft()
                batch.holder, batch.claimed_s = generator, now_s
                batch.version = self._version_for(slot, batch, held_version)
                slot.leased.append(batch)
                return batch
        return None

    def hedge(self, generator: int, now_s: float) -> Batch | float | None:
        """A batch that another generator is late with; else the time at which one will be late, None where none can."""
        if not self._spec.hedges or not self._recent_s:
            return None
        soonest_s: float | None = None
        for slot in self.open.values():
            others = (batch for batch in slot.leased if batch.holder != generator and batch.hedger is None)
            oldest = next(others, None)
            if oldest is None:
                continue
            late_s = oldest.claimed_s + LATE * (1 + self._spec.rollout.max_resamples) * self._median_s()
            if now_s >= late_s:
                oldest.hedger = generator
                return oldest
            soonest_s = late_s if soonest_s is None else min(soonest_s, late_s)
        return soonest_s

    def publish(self, batch: Batch, now_s: float, *, num_rounds: int = 1) -> bool:
        """Returns whether it is the first copy; one that comes later is refused as a duplicate or as stale."""
        if batch.is_published:
            return False
        slot = self.open[batch.iteration]
        batch.is_published = True
        slot.leased.remove(batch)
        slot.published.append(batch)
        slot.num_published += 1
        self._recent_s.appendleft((now_s - batch.claimed_s) / num_rounds)
        return True

    def commit(self) -> int:
        """Ends the oldest iteration, whose batches are all published, and opens the next one; returns its number."""
        committed = min(self.open)
        slot = self.open.pop(committed)
        if not slot.is_published:
            raise AssertionError(f"iteration {committed} has {slot.num_published} of {slot.expected} batches")
        self._newest_version = committed + 1
        self._open(self._schedule.opened_by(committed))
        self._dispatch_evaluation(committed + 1)
        return committed

    def _open(self, iteration: int) -> None:
        if iteration > self._spec.last_iteration:
            return
        oldest, newest = self._schedule.versions_of(iteration)
        num_training = self._spec.rollout.batches_per_iteration if iteration < self._spec.iterations else 0
        num_evaluation = self._spec.evaluation.num_batches if self._spec.evaluates(iteration) else 0
        slot = OpenIteration(
            number=iteration, oldest_version=oldest, newest_version=newest, expected=num_training + num_evaluation
        )
        slot.fresh.extend(Batch(iteration=iteration, purpose="train", index=index) for index in range(num_training))
        self.open[iteration] = slot

    def _dispatch_evaluation(self, iteration: int) -> None:
        """Held-out prompts go out when the version that they measure is there: `evaluation_version_of`."""
        slot = self.open.get(iteration)
        if slot is None or not self._spec.evaluates(iteration):
            return
        slot.fresh.extend(
            Batch(iteration=iteration, purpose="evaluation", index=index)
            for index in range(self._spec.evaluation.num_batches)
        )

    def _version_for(self, slot: OpenIteration, batch: Batch, held_version: int) -> int:
        if batch.purpose == "evaluation":
            return self._schedule.evaluation_version_of(slot.number)
        if slot.oldest_version <= held_version <= slot.newest_version:
            return held_version
        return min(slot.newest_version, self._newest_version)

    def _median_s(self) -> float:
        ordered = sorted(self._recent_s)
        return ordered[(len(ordered) + 1) // 2 - 1]
