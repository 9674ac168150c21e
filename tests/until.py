"""Waits of tests, each with a deadline that only a broken build reaches, and a clock that only a test moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from onbeat.base.process.waiting import Waiting

A = TypeVar("A")
SHORTEST_S, LONGEST_S = 0.01, 0.05
"""Pauses between two questions: a twentieth of the wait so far, within these. Who waits long computes little."""


class Clock:
    """Seconds that pass only where a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def until(
    answer: Callable[[], A],
    what: str,
    *,
    deadline_s: float = 300.0,
    tick: Callable[[], object] = lambda: None,
    away: tuple[type[Exception], ...] = (),
) -> A:
    """Asks until the answer is true, and returns it.

    tick: runs between two questions, as for a stack that replaces what died. away: errors that count as false.
    """
    waiting = Waiting(what, deadline_s=deadline_s)
    began_s = time.monotonic()
    while True:
        with suppress(*away):
            if found := answer():
                return found
        tick()
        waiting.poke()
        waited_s = time.monotonic() - began_s
        time.sleep(min(LONGEST_S, max(SHORTEST_S, waited_s / 20)))
