"""When an iteration's batches are trained: its loop is that of `onbeat/loop/`, its ranks those of `consumer/ranks/`.

take (as they arrive, or when all are there) ─▶ each to the rank that is free first, or all ranks together ─▶ step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.events import TimelineSpan
from onbeat.planning.pipeline.costs import BatchCost, Waits

CLAIMED_AT_ONCE = 4
"""As in onbeat/loop/gathering.py."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A batch that is there from `scored_s` on."""

    iteration: int
    batch_id: str
    is_training: bool
    version: int
    cost: BatchCost
    scored_s: float


@dataclass(kw_only=True)
class SimulatedTrainer:
    """One trainer with its ranks."""

    waits: Waits
    takes_at_once: bool
    world_size: int
    is_lockstep: bool
    """Whether the ranks share the model, and so pass together."""
    gain: float
    switch_s: float
    spans: list[TimelineSpan]
    num_takes: int = 0
    _free: list[float] = field(default_factory=list)
    """When each rank is free."""

    def train(self, arrivals: Sequence[Arrival], turned_s: float) -> float:
        """arrivals: all of an iteration, in their order. turned_s: from then on. Returns when the last pass ends."""
        now_s, taken = turned_s, 0
        self._free = [turned_s] * self.world_size
        while taken < len(arrivals):
            ready_s = arrivals[taken if self.takes_at_once else -1].scored_s
            waits = ready_s > max(now_s, *self._free)
            if ready_s > now_s:
                # While ranks are at work it looks again when one of them is done.
                now_s = ready_s if waits else min(end_s for end_s in self._free if end_s >= ready_s)
            if waits and not taken:
                now_s += self.switch_s
            there = [batch for batch in arrivals[taken : taken + CLAIMED_AT_ONCE] if batch.scored_s <= now_s]
            taken += len(there)
            self.num_takes += 1
            now_s += self.waits.arrival_s if waits else self.waits.take_s * len(there)
            now_s = self._pass([batch for batch in there if batch.is_training], now_s)
        return max(now_s, *self._free)

    def _pass(self, batches: Sequence[Arrival], now_s: float) -> float:
        """Returns when the trainer can take others: ranks of their own work on meanwhile."""
        if self.is_lockstep:
            for at in range(0, len(batches), self.world_size):
                together = batches[at : at + self.world_size]
                now_s = max(self._book(batch, rank, now_s) for rank, batch in enumerate(together))
            return now_s
        for batch in batches:
            rank = self._free.index(min(self._free))
            self._free[rank] = self._book(batch, rank, max(now_s, self._free[rank]))
        return now_s if self.world_size > 1 else max(now_s, self._free[0])

    def _book(self, batch: Arrival, rank: int, started_s: float) -> float:
        ended_s = started_s + batch.cost.train_s / self.gain
        who = f"trainer {rank}" if rank else "trainer"
        self.spans.append(
            TimelineSpan(
                who=who,
                what="train",
                iteration=batch.iteration,
                batch_id=batch.batch_id,
                started_s=started_s,
                ended_s=ended_s,
            )
        )
        return ended_s
