"""Which generator samples which batch, and when: each batch goes to the generator that is free first.

claim ─▶ (load the version, once nothing is sampled with the one before) ─▶ generate ─▶ score
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from contracts.events import TimelineSpan
from onbeat.planning.pipeline.costs import BatchCost, Machines, Waits

MAX_FINISHING = 4
"""As in producer/generator.py: with so many batches that are being scored a generator claims no further one."""


@dataclass(kw_only=True)
class SimulatedGenerator:
    """One generator: a process with its engine."""

    name: str
    gain: float
    lanes: list[float]
    """When each of the engine's places for a batch is free."""
    serving_s: float = 0.0
    """Until then it claims, or loads a version."""
    held_version: int = -1
    finishing: list[tuple[float, float]] = field(default_factory=list)
    """When its latest batches are sampled and when they are scored."""

    def free_s(self) -> float:
        """The time at which it can claim again."""
        free_s = max(self.serving_s, min(self.lanes))
        self.finishing = [ends for ends in self.finishing if ends[1] > free_s]
        scoring = sorted(scored_s for sampled_s, scored_s in self.finishing if sampled_s <= free_s)
        return free_s if len(scoring) < MAX_FINISHING else scoring[-MAX_FINISHING]

    def load(self, version: int, load_s: float) -> None:
        """What it samples ends before the next version is in its engine."""
        self.serving_s = max(self.serving_s, *self.lanes) + load_s
        self.held_version = version

    def sample(self, cost: BatchCost) -> list[tuple[str, float, float]]:
        """Returns (what, from, to) of the batch's rounds. Between two of them the engine samples another batch."""
        at_s = self.serving_s
        parts: list[tuple[str, float, float]] = []
        for one in cost.rounds:
            sampled_s = at_s + one.generate_s / self.gain
            parts += [("generate", at_s, sampled_s), ("score", sampled_s, sampled_s + one.score_s)]
            at_s = sampled_s + one.score_s
        self.lanes[self.lanes.index(min(self.lanes))] = self.serving_s + cost.generate_s / self.gain
        self.finishing.append(parts[-1][1:])
        return parts


class SimulatedGenerators:
    """All generators of a job, by the time at which each is free."""

    def __init__(self, machines: Machines, waits: Waits, *, places: int, gain: float, load_s: float) -> None:
        """places: batches that an engine samples at the same time. load_s: of a version that it does not hold."""
        self._waits = waits
        self._load_s = load_s
        self._free: list[tuple[float, int]] = [(0.0, number) for number in range(machines.num_generators)]
        self._all = [
            SimulatedGenerator(name=f"generator {number + 1}", gain=gain, lanes=[0.0] * places)
            for number in range(machines.num_generators)
        ]

    @property
    def next(self) -> tuple[float, SimulatedGenerator]:
        """(when it is free, the generator that is free first)."""
        free_s, number = self._free[0]
        return free_s, self._all[number]

    def sample(
        self, iteration: int, batch_id: str, cost: BatchCost, *, version: int, at_s: float
    ) -> list[TimelineSpan]:
        """Gives the generator that is free first a batch, at `at_s`; the last of its spans ends with its scores."""
        _, number = heapq.heappop(self._free)
        generator = self._all[number]
        generator.serving_s = at_s + self._waits.claim_s
        if generator.held_version != version:
            generator.load(version, self._load_s)
        parts = generator.sample(cost)
        heapq.heappush(self._free, (generator.free_s(), number))
        return [
            TimelineSpan(
                who=generator.name, what=what, iteration=iteration, batch_id=batch_id, started_s=from_s, ended_s=to_s
            )
            for what, from_s, to_s in parts
        ]
