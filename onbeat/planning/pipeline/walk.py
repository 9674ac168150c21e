"""Walks a job's pipeline batch by batch: each starts when the latest of what it waits for has ended.

    claim    the generator that is free first takes a batch of the oldest iteration that has one
    train    a rank that is free first takes the batch that arrived first
    commit   the last pass, the step, the version's way; it opens iteration t + K + 1

A run is a function of its arguments. Which versions sample an iteration, how many are open and which one a commit opens
is `contracts.schedule`'s, as for the trainer and the fence; `tests/rooms/planning/test_planned_order.py` holds the
walk and the scripts to the same answers. Where processes share cores, all that computes at a moment is slowed alike, so
that the walk goes by the time of a machine with enough of them, and is read on another clock when it has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from random import Random

from contracts.events import TimelineSpan
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from onbeat.planning.pipeline.costs import Costs, Machines
from onbeat.planning.pipeline.generators import SimulatedGenerators
from onbeat.planning.pipeline.load import beside, read_spans
from onbeat.planning.pipeline.trainer import Arrival, SimulatedTrainer


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that was predicted."""

    commits_s: list[float]
    """The time of each commit; the run ends with the last."""
    spans: list[TimelineSpan]
    batches: list[Arrival]
    """Those of the iterations that were committed, in the order of their claims."""
    num_claims: int
    """Also those that found no batch."""
    num_scripts: int
    """Calls of the broker's scripts, without heartbeats."""

    def busy_s(self, *kinds: str) -> float:
        """Seconds that all processes spend with these kinds of spans until the end."""
        end_s = self.commits_s[-1]
        return sum(max(0.0, min(end_s, one.ended_s) - one.started_s) for one in self.spans if one.what in kinds)


def walk(
    spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs, *, num_iterations: int, seed: int = 0
) -> Run:
    """schedule: in place of the spec's own. Ends with the last of `num_iterations` commits."""
    pipeline = _Pipeline(spec, schedule, machines, costs, Random(seed))
    while len(pipeline.commits_s) < num_iterations:
        pipeline.claim()
    batches = [batch for batch in pipeline.batches if batch.iteration < num_iterations]
    clock = beside(pipeline.spans, num_cores=machines.num_cores, threads=machines.threads)
    return Run(
        commits_s=[clock.read(time_s) for time_s in pipeline.commits_s[:num_iterations]],
        spans=read_spans(clock, pipeline.spans),
        batches=[replace(batch, scored_s=clock.read(batch.scored_s)) for batch in batches],
        num_claims=pipeline.num_claims,
        # A batch is published, an iteration is committed and opened, and its version announced.
        num_scripts=pipeline.num_claims + len(batches) + pipeline.trainer.num_takes + 2 * num_iterations,
    )


class _Pipeline:
    def __init__(self, spec: JobSpec, schedule: Schedule, machines: Machines, costs: Costs, draw: Random) -> None:
        self._spec, self._schedule, self._costs, self._draw = spec, schedule, costs, draw
        waits, is_alone = costs.waits, schedule.takes_turns
        completions = spec.rollout.prompts_per_batch * spec.rollout.group_size
        self._trainer_gain = machines.trainer_gain if is_alone else 1.0
        self._switch_s = machines.switch_s if is_alone else 0.0
        self.spans: list[TimelineSpan] = []
        self._generators = SimulatedGenerators(
            machines,
            waits,
            places=max(1, -(-machines.completions_at_once // completions)),
            gain=machines.generator_gain if is_alone else 1.0,
            load_s=waits.swap_s if schedule.lags else waits.load_s,
        )
        self.trainer = SimulatedTrainer(
            waits=waits,
            takes_at_once=schedule.takes_at_once,
            world_size=machines.world_size,
            is_lockstep=spec.trainer.sharding == "fsdp" and machines.world_size > 1,
            gain=self._trainer_gain,
            switch_s=self._switch_s,
            spans=self.spans,
        )
        self._turned_s = 0.0
        self._fresh: dict[int, deque[tuple[float, str]]] = {}
        """Open iteration → (from when on, id) of the batches that wait for a claim; oldest first."""
        self._arrivals: dict[int, list[Arrival]] = defaultdict(list)
        self.batches: list[Arrival] = []
        self.commits_s: list[float] = []
        self.num_claims = 0
        for iteration in range(schedule.num_open):
            self._open(iteration, 0.0)
        self._send_evaluation(0, 0.0)

    def claim(self) -> None:
        """The generator that is free first samples the oldest batch that is open by then."""
        free_s, generator = self._generators.next
        at_s = max(free_s, min(fresh[0][0] for fresh in self._fresh.values() if fresh))
        iteration = next(number for number, fresh in self._fresh.items() if fresh and fresh[0][0] <= at_s)
        _, batch_id = self._fresh[iteration].popleft()
        # Without work a generator asks once more than it gets.
        self.num_claims += 1 + (at_s > free_s)
        is_training = "/train/" in batch_id
        cost = self._draw.choice(self._costs.training if is_training else self._costs.evaluation)
        version = self._version_for(iteration, generator.held_version, is_training=is_training, at_s=at_s)
        parts = self._generators.sample(iteration, batch_id, cost, version=version, at_s=at_s)
        self.spans += parts
        arrival = Arrival(
            iteration=iteration,
            batch_id=batch_id,
            is_training=is_training,
            version=version,
            cost=cost,
            scored_s=parts[-1].ended_s,
        )
        self.batches.append(arrival)
        self._arrivals[iteration].append(arrival)
        oldest = min(self._fresh)
        while self._fresh and not self._fresh[oldest]:
            self._commit(oldest)
            oldest += 1

    def _version_for(self, iteration: int, held: int, *, is_training: bool, at_s: float) -> int:
        if not is_training:
            return iteration  # the version that is evaluated
        oldest, newest = self._schedule.versions_of(iteration)
        return held if oldest <= held <= newest else min(newest, bisect_right(self.commits_s, at_s))

    def _commit(self, iteration: int) -> None:
        """Trains an iteration whose batches are all claimed, steps, and opens the next one."""
        waits = self._costs.waits
        arrivals = sorted(self._arrivals.pop(iteration), key=lambda batch: batch.scored_s)
        now_s = self.trainer.train(arrivals, self._turned_s)
        if iteration < self._spec.iterations:
            cost = self._draw.choice(self._costs.steps)
            now_s = self._book("step", iteration, now_s, cost.step_s / self._trainer_gain)
            now_s = self._book("sync", iteration, now_s, cost.publish_s)
        now_s = self._book("open", iteration + 1, now_s, waits.open_s)
        self.commits_s.append(now_s)
        now_s += self._switch_s
        del self._fresh[iteration]
        self._open(self._schedule.opened_by(iteration), now_s)
        self._send_evaluation(iteration + 1, now_s)
        is_due = iteration < self._spec.iterations and self._spec.checkpoints_after(iteration)
        self._turned_s = now_s + waits.after_s + (waits.checkpoint_s if is_due else 0.0)

    def _open(self, iteration: int, at_s: float) -> None:
        if iteration > self._spec.last_iteration:
            return
        number = self._spec.rollout.batches_per_iteration if iteration < self._spec.iterations else 0
        self._fresh[iteration] = deque((at_s, f"{iteration}/train/{index}") for index in range(number))

    def _send_evaluation(self, iteration: int, at_s: float) -> None:
        """Held-out prompts go out when the version that they measure is there."""
        if iteration in self._fresh and self._spec.evaluates(iteration):
            number = self._spec.evaluation.num_batches
            self._fresh[iteration].extend((at_s, f"{iteration}/evaluation/{index}") for index in range(number))

    def _book(self, what: str, iteration: int, started_s: float, seconds: float) -> float:
        """Returns when it ends."""
        self.spans.append(
            TimelineSpan(
                who="trainer", what=what, iteration=iteration, started_s=started_s, ended_s=started_s + seconds
            )
        )
        return started_s + seconds
