"""Simulated generators: each claims when its engine has room, and works as `producer/generator.py` does.

claim ─▶ (receive the version) ─▶ generate ─▶ score ─▶ publish
  ▲                                  │          └── up to MAX_FINISHING batches beside the next one
  └──────────── room ────────────────┘
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from simpy import AnyOf, Environment, Event, Interrupt, Process, Resource

from onbeat_extras.planning.pipeline.costs import BatchCost, Round
from onbeat_extras.planning.pipeline.simulation import Pipeline
from onbeat_extras.planning.pipeline.window import Batch

MAX_FINISHING = 4
"""As in producer/generator.py."""
PRESENCE_INTERVAL_S = 2.0
"""As in onbeat/work/heartbeat.py."""
COPY_LOOK_S = 0.02
"""As there: time between two looks at whether a copy is still needed."""
BEATS_PER_LEASE = 3
"""Heartbeats in the time of a lease, as there."""

Steps = Generator[Event, Any, None]


class SimulatedGenerator:
    """One generator: a serve loop, and a process for each batch between its claim and its end."""

    def __init__(self, pipeline: Pipeline, number: int) -> None:
        self._pipeline = pipeline
        self._environment: Environment = pipeline.environment
        self._number = number
        self.name = f"generator {number}"
        machines = pipeline.setup.machines
        self._completions_at_once = machines.completions_at_once
        # An engine that takes one batch at a time finishes it before the next round of another.
        self._engine = Resource(self._environment, capacity=1) if machines.completions_at_once == 1 else None
        is_alone = pipeline.is_colocated
        self._gain = machines.generator_gain if is_alone else 1.0
        self._threads = machines.threads
        self._held_version = -1
        self._num_sampling = 0
        self._num_finishing = 0
        self._num_in_need = 0
        """Batches that are in the engine or may come back to it: the version stays until they are out."""
        self._freed = self._environment.event()

    def run(self) -> Steps:
        """Serves for ever: the end of the simulation ends it."""
        pipeline, waits = self._pipeline, self._pipeline.setup.costs.waits
        while True:
            while self._is_full:
                yield self._freed
            found, is_copy = self._claim()
            if found is None:
                yield from self._wait_for_work()
                continue
            yield self._environment.timeout(waits.claim_s)
            if self._held_version != found.version:
                yield from self._receive(found)
            cost = pipeline.cost_of(found)
            self._num_sampling += self._completions(found)
            self._num_in_need += 1
            carried = self._environment.process(self._carry(found, cost))
            if is_copy:
                self._environment.process(self._drop_when_settled(carried, found))

    @property
    def _is_full(self) -> bool:
        return self._num_sampling >= self._completions_at_once or self._num_finishing >= MAX_FINISHING

    def _claim(self) -> tuple[Batch | None, bool]:
        """(the batch, whether it is a copy)."""
        pipeline = self._pipeline
        pipeline.outcome.scripts["claim_prompt"] += 1
        found = pipeline.window.claim(self._number, self._held_version, pipeline.now_s)
        if found is not None:
            return found, False
        copied = pipeline.window.hedge(self._number, pipeline.now_s)
        if isinstance(copied, Batch):
            pipeline.outcome.num_hedges += 1
            return copied, True
        self._late_s = copied
        return None, False

    def _wait_for_work(self) -> Steps:
        """Until prompts come, or a batch is late enough to be copied."""
        news: list[Event] = [self._pipeline.prompts()]
        if self._late_s is not None:
            news.append(self._environment.timeout(max(0.0, self._late_s - self._pipeline.now_s) + 1e-3))
        yield AnyOf(self._environment, news)

    def _receive(self, batch: Batch) -> Steps:
        """Puts the batch's version into the engine, once nothing in it needs the one before."""
        while self._num_in_need:
            yield self._freed
        setup = self._pipeline.setup
        waits = setup.costs.waits
        yield self._environment.timeout(waits.swap_s if setup.schedule.lags else waits.load_s)
        self._held_version = batch.version

    def _carry(self, batch: Batch, cost: BatchCost) -> Steps:
        is_sampling = True
        try:
            for number, one in enumerate(cost.rounds):
                if number:
                    self._num_sampling += self._completions(batch)
                    is_sampling = True
                yield from self._generate(batch, one)
                self._num_sampling -= self._completions(batch)
                is_sampling = False
                if number == len(cost.rounds) - 1:
                    self._num_in_need -= 1
                self._num_finishing += 1
                self._free()
                yield from self._score(batch, one)
                self._num_finishing -= 1
                self._free()
        except Interrupt:
            if is_sampling:
                self._num_sampling -= self._completions(batch)
                self._num_in_need -= 1
            else:
                self._num_finishing -= 1
            self._free()
            return
        self._publish(batch, cost)

    def _generate(self, batch: Batch, one: Round) -> Steps:
        pipeline = self._pipeline
        if self._engine is None:
            started_s = pipeline.now_s
            yield from pipeline.processors.compute(one.generate_s / self._gain, threads=self._threads)
        else:
            with self._engine.request() as turn:
                yield turn
                started_s = pipeline.now_s
                yield from pipeline.processors.compute(one.generate_s / self._gain, threads=self._threads)
        pipeline.span(self.name, "generate", batch.iteration, started_s, batch_id=batch.batch_id)
        pipeline.outcome.last_token_s = pipeline.now_s

    def _score(self, batch: Batch, one: Round) -> Steps:
        pipeline, started_s = self._pipeline, self._pipeline.now_s
        yield from pipeline.processors.compute(one.score_s)
        pipeline.span(self.name, "score", batch.iteration, started_s, batch_id=batch.batch_id)

    def _publish(self, batch: Batch, cost: BatchCost) -> None:
        pipeline = self._pipeline
        pipeline.outcome.scripts["publish_batch"] += 1
        if pipeline.window.publish(batch, pipeline.now_s, num_rounds=len(cost.rounds)):
            num_bytes = pipeline.setup.batch_bytes.of(cost)
            pipeline.outcome.rollout_bytes += num_bytes
            pipeline.count_resident(num_bytes)
            pipeline.ring_rollouts()

    def _drop_when_settled(self, carried: Process, batch: Batch) -> Steps:
        """Drops a copy at the first look after the other generator has published the batch."""
        pipeline, began_s = self._pipeline, self._pipeline.now_s
        while carried.is_alive and not batch.is_published:
            yield AnyOf(self._environment, [carried, pipeline.rollouts()])
        yield AnyOf(self._environment, [carried, self._environment.timeout(COPY_LOOK_S)])
        pipeline.outcome.scripts["renew_prompts"] += int((pipeline.now_s - began_s) / COPY_LOOK_S)
        if carried.is_alive:
            carried.interrupt()

    def _completions(self, batch: Batch) -> int:
        rollout = self._pipeline.setup.spec.rollout
        if batch.purpose == "train":
            return rollout.prompts_per_batch * rollout.group_size
        return self._pipeline.setup.spec.evaluation.prompts_per_batch

    def _free(self) -> None:
        bell, self._freed = self._freed, self._environment.event()
        bell.succeed()
