"""The processors that simulated processes compute on: devices of their own, or the cores of one machine, shared."""

from __future__ import annotations

import heapq
from collections.abc import Generator
from itertools import count

from simpy import Environment, Event


class Processors:
    """Gives each computation its seconds, longer where more threads want to compute than there are cores.

    With `num_cores` = 0 each process has a device of its own. Otherwise all share one machine as its kernel shares it:
    with twice as many busy threads as cores, each computes at half its speed.
    """

    def __init__(self, environment: Environment, num_cores: int = 0) -> None:
        self._environment = environment
        self._num_cores = num_cores
        self._numbers = count()
        self._running: list[tuple[float, int, int, Event]] = []
        """Heap of (progress at which it ends, its number, threads, the event of its end)."""
        self._threads = 0
        self._progress_s = 0.0
        """Seconds that a computation which ran from the start would have got."""
        self._updated_s = 0.0
        self._alarm = 0
        """Number of the alarm that counts; earlier ones were set for another load."""

    def compute(self, seconds: float, *, threads: int = 1) -> Generator[Event, None, None]:
        """Runs for so many seconds of `threads` cores of its own. A process that is interrupted in it drops it."""
        if self._num_cores == 0:
            yield self._environment.timeout(seconds)
            return
        self._advance()
        ended = self._environment.event()
        entry = (self._progress_s + seconds, next(self._numbers), threads, ended)
        heapq.heappush(self._running, entry)
        self._threads += threads
        self._set_alarm()
        try:
            yield ended
        except BaseException:
            self._advance()
            self._running.remove(entry)
            heapq.heapify(self._running)
            self._threads -= threads
            self._set_alarm()
            raise

    @property
    def _speed(self) -> float:
        return min(1.0, self._num_cores / self._threads) if self._threads else 1.0

    def _advance(self) -> None:
        self._progress_s += (self._environment.now - self._updated_s) * self._speed
        self._updated_s = self._environment.now

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._running:
            left_s = max(0.0, self._running[0][0] - self._progress_s) / self._speed
            alarm = self._environment.timeout(left_s, value=self._alarm)
            alarm.callbacks.append(self._end_due)  # type: ignore[union-attr]

    def _end_due(self, alarm: Event) -> None:
        if alarm.value != self._alarm:
            return
        self._advance()
        # The first one is due: rounding must not leave a rest that no time would ever pass for.
        self._progress_s = max(self._progress_s, self._running[0][0])
        while self._running and self._running[0][0] <= self._progress_s:
            _, _, threads, ended = heapq.heappop(self._running)
            self._threads -= threads
            ended.succeed()
        self._set_alarm()
