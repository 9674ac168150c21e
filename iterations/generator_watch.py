"""Notices a job that no generator serves, and weights that a generator cannot load."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from broker.presence import (
    AWAKE_FOR,
    ENGINE,
    LOADING_WEIGHTS,
    NOT_REPRODUCIBLE,
    REJECTED_WEIGHTS,
    WRONG_ENGINE,
    GeneratorInfo,
    Presence,
)
from contracts.run_folder import VERSION, number_of
from process.waiting import Waiting

LOOK_EVERY_S = 2.0
TURN_PATIENCE_S = 5.0
"""Two signs of life and more: a generator that died in its turn has none."""
TURN_POLL_S = 0.005
LOADS_FOR_S = 600.0
"""So long a version that no open iteration is sampled by stays for generators that say they load it: what they write
there is theirs, and could keep each version for ever. One that was still at it refuses it, and claims anew."""
CURE = (
    "start one with `python -m producer`, raise timeouts.no_generator_s, or let any engine serve the job: "
    "deterministic = false"
)

log = logging.getLogger(__name__)


class GeneratorWatch:
    """What a trainer knows of the live generators; it calls `check` while it waits."""

    def __init__(
        self,
        presence: Presence,
        *,
        job_id: str,
        deadline_s: float,
        deterministic: bool,
        kind: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """deterministic: as the job's spec has it; generators that leave such a job alone count as absent (I7). kind:
        asks which kind of engine samples it."""
        self._job_id = job_id
        self._kind = kind
        self._presence = presence
        self._deterministic = deterministic
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        self._looked_s = float("-inf")
        self._passed: dict[str, float] = {}
        """Folder of a version that the window has left and that is still loaded → when that was seen first."""
        self._waiting: Waiting | None = None

    def loading(self, *, before: int) -> frozenset[str]:
        """Returns the folders of the versions before this one that live generators load, as their manifests name them.

        before: the oldest version that is still needed. One is named for LOADS_FOR_S at most.
        """
        named = {
            directory
            for generator in self._presence.live()
            for directory in generator.info.get(LOADING_WEIGHTS, "").split()
            if (number := number_of(directory, VERSION)) is not None and number < before
        }
        now_s = self._clock()
        self._passed = {directory: self._passed.get(directory, now_s) for directory in named}
        loading = frozenset(one for one in named if now_s - self._passed[one] < LOADS_FOR_S)
        if loading != named:
            log.warning("removes %s, which a generator has loaded for too long", ", ".join(sorted(named - loading)))
        return loading

    def wait_for_turn(self, job_id: str, check: Callable[[], object]) -> None:
        """Returns when no live generator is awake for this colocated job, or has not let go of its turn for too long.

        A generator that hangs, in a copy of a batch that another one has published, must not hold the job up. check: is
        called meanwhile; an error that it raises ends the wait.
        """
        began_s = self._clock()
        while awake := [one.generator_id for one in self._presence.live() if one.info.get(AWAKE_FOR) == job_id]:
            if self._clock() - began_s >= TURN_PATIENCE_S:
                log.warning("trains while %s may still hold memory", ", ".join(awake))
                return
            check()
            self._sleep(TURN_POLL_S)

    def check(self) -> frozenset[str]:
        """Returns, every 2 s, the folders of the weights that generators refuse now.

        Raises DeadlineExceeded after deadline_s without a live generator that serves this job.
        """
        if self._clock() - self._looked_s < LOOK_EVERY_S:
            return frozenset()
        self._looked_s = self._clock()
        live = self._presence.live()
        if able := [one for one in live if not self._deterministic or self._is_able(one)]:
            self._waiting = None
            return frozenset(generator.info.get(REJECTED_WEIGHTS, "") for generator in able) - {""}
        if self._waiting is None:
            self._waiting = Waiting("a live generator", deadline_s=self._deadline_s, cure=CURE, clock=self._clock)
        self._waiting.poke(self._awaited(live))
        return frozenset()

    def _is_able(self, one: GeneratorInfo) -> bool:
        return not one.info.get(NOT_REPRODUCIBLE) and self._job_id not in one.info.get(WRONG_ENGINE, "").split()

    def _awaited(self, live: list[GeneratorInfo]) -> str:
        """What is waited for, where no live generator serves the job."""
        if not live:
            return "a live generator"
        others = {one.info.get(ENGINE, "") for one in live if self._job_id in one.info.get(WRONG_ENGINE, "").split()}
        if not others:
            return "a live generator for a deterministic job"
        return (
            f"a live generator of the kind of engine that samples this job ({self._kind()}); those that live have "
            f"({') and ('.join(sorted(others))})"
        )
