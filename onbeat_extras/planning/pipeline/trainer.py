"""The simulated trainer, and the start of a whole pipeline: its loop is that of `consumer/trainer/`.

take (at once, or when all are published) ─▶ ranks train ─▶ step ─▶ publish ─▶ commit t, open the next ─▶ checkpoint
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from simpy import AllOf, Environment, Event, Store

from onbeat_extras.planning.pipeline.generators import SimulatedGenerator
from onbeat_extras.planning.pipeline.simulation import Pipeline
from onbeat_extras.planning.pipeline.window import Batch, OpenIteration

CLAIMED_AT_ONCE = 4
"""As in consumer/trainer/gather.py."""
HANDED_OUT_PER_RANK = 2
"""As in consumer/ranks/group.py."""

Steps = Generator[Event, Any, None]


def start(pipeline: Pipeline) -> Event:
    """Puts all processes into a pipeline; returns the end of its trainer."""
    pipeline.window.start()
    pipeline.outcome.scripts["open_iteration"] += pipeline.setup.schedule.num_open
    for number in range(1, pipeline.setup.machines.num_generators + 1):
        pipeline.environment.process(SimulatedGenerator(pipeline, number).run())
    return pipeline.environment.process(SimulatedTrainer(pipeline).run())


class SimulatedTrainer:
    """The loop of one trainer with its ranks."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._environment: Environment = pipeline.environment
        setup = pipeline.setup
        self._setup = setup
        self._world_size = setup.machines.world_size
        self._is_lockstep = setup.spec.trainer.sharding == "fsdp"
        is_alone = pipeline.is_colocated
        self._gain = setup.machines.trainer_gain if is_alone else 1.0
        self._switch_s = setup.machines.switch_s if is_alone else 0.0
        self._orders: Store = Store(self._environment)
        self._num_training = 0
        self._trained = self._environment.event()
        if self._world_size > 1 and not self._is_lockstep:
            for rank in range(self._world_size):
                self._environment.process(self._serve_rank(rank))

    def run(self) -> Steps:
        """Returns with the last of the setup's commits."""
        for _ in range(self._setup.num_iterations):
            slot = next(iter(self._pipeline.window.open.values()))
            yield from self._gather(slot)
            if slot.number < self._setup.spec.iterations:
                yield from self._step(slot.number)
            yield from self._commit(slot)

    def _gather(self, slot: OpenIteration) -> Steps:
        """Trains what arrives until every batch of the iteration was taken."""
        pipeline, num_taken, has_waited = self._pipeline, 0, False
        while num_taken < slot.expected or self._num_training:
            may_take = self._setup.schedule.takes_at_once or slot.is_published
            if may_take and slot.published and self._has_room:
                if has_waited and not num_taken and self._switch_s:
                    yield self._environment.timeout(self._switch_s)
                arrived = [slot.published.popleft() for _ in range(min(CLAIMED_AT_ONCE, len(slot.published)))]
                num_taken += len(arrived)
                pipeline.outcome.scripts["claim_rollouts"] += 1
                waits = self._setup.costs.waits
                yield self._environment.timeout(waits.arrival_s if has_waited else waits.take_s * len(arrived))
                has_waited = False
                yield from self._train([batch for batch in arrived if batch.purpose == "train"])
                continue
            has_waited = not self._num_training
            yield self._trained if self._num_training else pipeline.rollouts()

    @property
    def _has_room(self) -> bool:
        if self._world_size == 1 or self._is_lockstep:
            return True
        return self._num_training < HANDED_OUT_PER_RANK * self._world_size

    def _train(self, batches: list[Batch]) -> Steps:
        """One process trains a batch as it gets it; ranks take orders; ranks in lockstep pass together."""
        for batch in batches:
            self._count(batch)
        if self._world_size == 1:
            for batch in batches:
                yield from self._pass(batch, 0)
        elif self._is_lockstep:
            while batches:
                together, batches = batches[: self._world_size], batches[self._world_size :]
                yield AllOf(
                    self._environment,
                    [self._environment.process(self._pass(batch, rank)) for rank, batch in enumerate(together)],
                )
        else:
            self._num_training += len(batches)
            for batch in batches:
                self._orders.put(batch)

    def _serve_rank(self, rank: int) -> Steps:
        while True:
            batch = yield self._orders.get()
            assert isinstance(batch, Batch)
            yield from self._pass(batch, rank)
            self._num_training -= 1
            bell, self._trained = self._trained, self._environment.event()
            bell.succeed()

    def _pass(self, batch: Batch, rank: int) -> Steps:
        pipeline, started_s = self._pipeline, self._pipeline.now_s
        cost = pipeline.cost_of(batch)
        yield from pipeline.processors.compute(cost.train_s / self._gain, threads=self._setup.machines.threads)
        who = f"trainer {rank}" if rank else "trainer"
        pipeline.span(who, "train", batch.iteration, started_s, batch_id=batch.batch_id)

    def _count(self, batch: Batch) -> None:
        outcome = self._pipeline.outcome
        outcome.lags[batch.iteration - batch.version] += 1
        outcome.num_tokens += self._pipeline.cost_of(batch).num_tokens

    def _step(self, iteration: int) -> Steps:
        pipeline, cost = self._pipeline, self._setup.costs.step(self._pipeline.draw)
        started_s = pipeline.now_s
        yield from pipeline.processors.compute(cost.step_s / self._gain, threads=self._setup.machines.threads)
        pipeline.span("trainer", "step", iteration, started_s)
        started_s = pipeline.now_s
        yield self._environment.timeout(cost.publish_s)
        pipeline.span("trainer", "sync", iteration, started_s)
        pipeline.outcome.scripts["publish_weights"] += 1

    def _commit(self, slot: OpenIteration) -> Steps:
        pipeline, waits, spec = self._pipeline, self._setup.costs.waits, self._setup.spec
        started_s = pipeline.now_s
        yield self._environment.timeout(waits.open_s)
        pipeline.window.commit()
        pipeline.clear(slot.number)
        pipeline.outcome.scripts["commit_iteration"] += 1
        pipeline.outcome.commits_s.append(pipeline.now_s)
        pipeline.span("trainer", "open", slot.number + 1, started_s)
        if self._switch_s:
            yield self._environment.timeout(self._switch_s)
        pipeline.ring_prompts()
        yield self._environment.timeout(waits.after_s)
        if slot.number < spec.iterations and spec.checkpoints_after(slot.number):
            yield self._environment.timeout(waits.checkpoint_s)
