"""How processes that share one machine's cores slow each other down, and how much of a span was that.

With twice as many busy threads as cores, each computes at half its speed: as a machine's kernel shares it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

from contracts.events import TimelineSpan

COMPUTES = frozenset({"generate", "score", "train", "step"})


class Clock:
    """Reads one time as another, piece by piece between `times`, in each at one speed."""

    def __init__(self, times: Sequence[float], speeds: Iterable[float]) -> None:
        self._times = times
        self._speeds = [*speeds, 1.0]
        pieces = (
            (later - sooner) * speed for (sooner, later), speed in zip(pairwise(times), self._speeds, strict=False)
        )
        self._read = list(accumulate(pieces, initial=times[0] if times else 0.0))

    def read(self, time_s: float) -> float:
        at = bisect_left(self._times, time_s) - 1
        if at < 0:
            return time_s
        return self._read[at] + (time_s - self._times[at]) * self._speeds[min(at, len(self._speeds) - 1)]

    def seconds(self, span: TimelineSpan) -> float:
        return self.read(span.ended_s) - self.read(span.started_s)


def alone(spans: Sequence[TimelineSpan], *, num_cores: int, threads: int) -> Clock:
    """Takes off what ran beside: a span of a run, read on it, is as long as it would have been by itself."""
    times, running = _running(spans, threads)
    return Clock(times, (min(1.0, num_cores / number) if number and num_cores else 1.0 for number in running))


def beside(spans: Sequence[TimelineSpan], *, num_cores: int, threads: int) -> Clock:
    """Puts it on again: times at which all could be computed at full speed become those of the shared machine."""
    times, running = _running(spans, threads)
    return Clock(times, (max(1.0, number / num_cores) if num_cores else 1.0 for number in running))


def read_spans(clock: Clock, spans: Iterable[TimelineSpan]) -> list[TimelineSpan]:
    return [
        msgspec.structs.replace(span, started_s=clock.read(span.started_s), ended_s=clock.read(span.ended_s))
        for span in spans
    ]


def _running(spans: Iterable[TimelineSpan], threads: int) -> tuple[list[float], list[int]]:
    """Returns (times at which a computation starts or ends, threads that are busy from each of them on)."""
    changes: dict[float, int] = defaultdict(int)
    for span in spans:
        if span.what in COMPUTES:
            used = 1 if span.what == "score" else threads
            changes[span.started_s] += used
            changes[span.ended_s] -= used
    times = sorted(changes)
    return times, list(accumulate(changes[time_s] for time_s in times))
