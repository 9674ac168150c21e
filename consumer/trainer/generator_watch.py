"""Notices a job that no generator serves, and weights that a generator cannot load."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.presence import LOADING_WEIGHTS, NOT_REPRODUCIBLE, REJECTED_WEIGHTS, Presence
from process.waiting import Waiting

LOOK_EVERY_S = 2.0
CURE = (
    "start one with `python -m producer`, raise timeouts.no_generator_s, or let vLLM's serve it: deterministic = false"
)


class GeneratorWatch:
    """What a trainer knows of the live generators; it calls `check` while it waits."""

    def __init__(
        self,
        presence: Presence,
        *,
        deadline_s: float,
        deterministic: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """deterministic: as the job's spec has it; generators that leave such a job alone count as absent (I7)."""
        self._presence = presence
        self._deterministic = deterministic
        self._deadline_s = deadline_s
        self._clock = clock
        self._looked_s = float("-inf")
        self._waiting: Waiting | None = None

    def loading(self) -> frozenset[str]:
        """Returns the folders of the weights that live generators load now, as their manifests name them."""
        return frozenset(
            directory
            for generator in self._presence.live()
            for directory in generator.info.get(LOADING_WEIGHTS, "").split()
        )

    def check(self) -> frozenset[str]:
        """Returns, every 2 s, the folders of the weights that generators refuse now.

        Raises DeadlineExceeded after deadline_s without a live generator that serves this job.
        """
        if self._clock() - self._looked_s < LOOK_EVERY_S:
            return frozenset()
        self._looked_s = self._clock()
        live = self._presence.live()
        if able := [one for one in live if not (self._deterministic and one.info.get(NOT_REPRODUCIBLE))]:
            self._waiting = None
            return frozenset(generator.info.get(REJECTED_WEIGHTS, "") for generator in able) - {""}
        if self._waiting is None:
            self._waiting = Waiting("a live generator", deadline_s=self._deadline_s, cure=CURE, clock=self._clock)
        self._waiting.poke("a live generator for a deterministic job" if live else "a live generator")
        return frozenset()
