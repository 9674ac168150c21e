"""Notices a stage that has work waiting, and no worker that serves it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from broker.presence import StagePresence
from contracts.spec_tables.stages import ExternalStage, StageSpec
from onbeat.loop.generator_watch import CURE_OF_SERVICE
from onbeat.process.waiting import Waiting

LOOK_EVERY_S = 2.0
CURE = "start one with `python -m consumer.stages`, or raise timeouts.no_stage_worker_s"
CURE_OF_EXTERNAL = "start your process that serves it (docs/extend.md), or raise timeouts.no_stage_worker_s"


class StageWatch:
    """What a trainer knows of the live stage workers; it calls `check` while it waits."""

    def __init__(
        self,
        presence: StagePresence,
        job_id: str,
        stages: Sequence[StageSpec],
        *,
        with_work: Callable[[int], Sequence[str]],
        deadline_s: float,
        dependency_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """with_work: `TrainerSide.stages_with_work`. dependency_s: how long a judge may be away."""
        self._presence = presence
        self._job_id = job_id
        self._stages = stages
        self._with_work = with_work
        self._deadline_s = deadline_s
        self._clock = clock
        self._looked_s = float("-inf")
        self._dependency_s = dependency_s
        self._waiting: dict[str, Waiting] = {}
        self._missing: dict[str, Waiting] = {}

    def check(self, iteration: int) -> None:
        """Looks every 2 s; does nothing in a job without stages.

        Raises DeadlineExceeded naming a stage of the iteration that had work and no live worker for deadline_s, or none
        that reached its judge for dependency_s.
        """
        if not self._stages or self._clock() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = self._clock()
        with_work = set(self._with_work(iteration))
        unserved = self._presence.unserved(self._job_id, self._stages)
        unserved = {name: awaited for name, awaited in unserved.items() if name in with_work}
        self._waiting = {name: waiting for name, waiting in self._waiting.items() if name in unserved}
        for stage in self._stages:
            if stage.name in unserved:
                self._waiting_for(stage, unserved[stage.name]).poke(unserved[stage.name])
        self._check_judges(with_work)

    def _check_judges(self, with_work: set[str]) -> None:
        missed = self._presence.missed(self._job_id, [stage for stage in self._stages if stage.name in with_work])
        self._missing = {name: waiting for name, waiting in self._missing.items() if name in missed}
        for name, what in missed.items():
            if name not in self._missing:
                self._missing[name] = Waiting(
                    what, deadline_s=self._dependency_s, cure=CURE_OF_SERVICE, clock=self._clock
                )
            self._missing[name].poke(f"{what}: stage {name} needs it")

    def _waiting_for(self, stage: StageSpec, awaited: str) -> Waiting:
        if stage.name not in self._waiting:
            self._waiting[stage.name] = Waiting(
                awaited,
                deadline_s=self._deadline_s,
                cure=CURE_OF_EXTERNAL if isinstance(stage, ExternalStage) else CURE,
                clock=self._clock,
            )
        return self._waiting[stage.name]
