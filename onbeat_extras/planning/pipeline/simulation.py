"""Runs a job's pipeline as discrete events: generators and a trainer around the window, each as its product does it.

    generators ── claim ─▶ receive ─▶ generate ─▶ score ─▶ publish ─┐          generators.py
        ▲                                                          ▼
        │  woken by an opening                                  Window          window.py: the fence's rules
        │                                                          │
        └──────────── commit, open ◀── step, publish ◀── train ◀───┘          trainer.py

A run is a function of its setup and its seed. It ends with the last of `num_iterations` commits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from simpy import Environment, Event

from contracts.events import TimelineSpan
from contracts.schedule import Schedule
from contracts.spec import JobSpec
from onbeat_extras.planning.pipeline.costs import BatchBytes, BatchCost, Costs
from onbeat_extras.planning.pipeline.processors import Processors
from onbeat_extras.planning.pipeline.window import Batch, Window


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What a job runs on."""

    num_generators: int = 1
    world_size: int = 1
    completions_at_once: int = 1
    """An engine's `max_concurrent_completions`: below so many a generator claims another batch; 1 is one batch."""
    num_cores: int = 0
    """Cores of the one machine that all processes share; 0: each has devices of its own."""
    threads: int = 1
    """Each generator and rank has so many, where they share a machine."""
    generator_gain: float = 1.0
    """Under `colocated`, how many times faster one generator samples than with its own share of the devices."""
    trainer_gain: float = 1.0
    """The same of a rank."""
    is_gain_known: bool = False
    """Whether the gains are measured, or stated; otherwise they are what ideal scaling gives."""
    switch_s: float = 0.0
    """Under `colocated`, to hand the devices over, once in each direction."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run to simulate."""

    spec: JobSpec
    schedule: Schedule
    machines: Machines
    costs: Costs
    batch_bytes: BatchBytes
    num_iterations: int
    """Commits after which the run ends; at most the iterations of the spec, and its last one that only evaluates."""
    keeps_spans: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What a run left behind."""

    commits_s: list[float] = field(default_factory=list)
    """The time of each commit."""
    spans: list[TimelineSpan] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By what: generate, train, step; summed over generators and ranks."""
    last_token_s: float = 0.0
    scripts: Counter[str] = field(default_factory=Counter)
    """Calls of each of the broker's scripts."""
    rollout_bytes: float = 0.0
    """Bytes of all published batches."""
    resident_bytes: float = 0.0
    most_resident_bytes: float = 0.0
    lags: Counter[int] = field(default_factory=Counter)
    """Trained batches by lag."""
    num_tokens: int = 0
    num_hedges: int = 0


class Pipeline:
    """What the simulated processes share: the clock, the window, the processors, and a bell for each kind of news."""

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.environment = Environment()
        self.window = Window(setup.spec, setup.schedule)
        self.processors = Processors(self.environment, setup.machines.num_cores)
        self.outcome = Outcome()
        self.draw = Random(seed)
        self._costs: dict[str, BatchCost] = {}
        self._prompts_bell = self.environment.event()
        self._rollouts_bell = self.environment.event()

    @property
    def now_s(self) -> float:
        return self.environment.now

    @property
    def is_colocated(self) -> bool:
        return self.setup.schedule.name == "colocated"

    def cost_of(self, batch: Batch) -> BatchCost:
        """What a batch costs, the same for each copy of it: its prompts and seeds are."""
        cost = self._costs.get(batch.batch_id)
        if cost is None:
            costs = self.setup.costs
            cost = (costs.training_batch if batch.purpose == "train" else costs.evaluation_batch)(self.draw)
            self._costs[batch.batch_id] = cost
        return cost

    def clear(self, iteration: int) -> None:
        """Empties the slot of a committed iteration: the script that commits it takes its batches out of Redis."""
        prefix = f"{iteration}/"
        cleared = [batch_id for batch_id in self._costs if batch_id.startswith(prefix)]
        self.count_resident(-sum(self.setup.batch_bytes.of(self._costs.pop(batch_id)) for batch_id in cleared))

    def prompts(self) -> Event:
        """Returns what a generator without work waits for."""
        return self._prompts_bell

    def rollouts(self) -> Event:
        """Returns what a trainer without work waits for."""
        return self._rollouts_bell

    def ring_prompts(self) -> None:
        bell, self._prompts_bell = self._prompts_bell, self.environment.event()
        bell.succeed()

    def ring_rollouts(self) -> None:
        bell, self._rollouts_bell = self._rollouts_bell, self.environment.event()
        bell.succeed()

    def count_resident(self, num_bytes: float) -> None:
        """Adds bytes that Redis holds now, or takes them away."""
        outcome = self.outcome
        outcome.resident_bytes += num_bytes
        outcome.most_resident_bytes = max(outcome.most_resident_bytes, outcome.resident_bytes)

    def span(self, who: str, what: str, iteration: int, started_s: float, *, batch_id: str = "") -> None:
        """Books what a process did until now."""
        if what != "score":
            self.outcome.busy_s[what] += self.now_s - started_s
        if self.setup.keeps_spans:
            self.outcome.spans.append(
                TimelineSpan(
                    who=who, what=what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=self.now_s
                )
            )


def simulate(setup: Setup, seed: int, *, start: Callable[[Pipeline], Event]) -> Outcome:
    """Runs one job to the last of its commits. start: puts the processes into a pipeline, returns what ends it."""
    pipeline = Pipeline(setup, seed)
    pipeline.environment.run(until=start(pipeline))
    return pipeline.outcome
