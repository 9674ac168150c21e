"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format": complete events (`ph` X, microseconds), names of processes and threads
(`ph` M), and flow events (`ph` s, then f with `bp` e), which draw the critical path as arrows. Events of one thread
must nest, and Perfetto doesn't show those that overlap otherwise: a lane has as many threads as it does things at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

from contracts.timeline import LaneKind, kind_of
from gateway.timeline.report import TimelineReport, name_of

ITERATIONS = 1
PROCESSES: dict[LaneKind, int] = {"rank": 2, "generator": 3, "stage": 4}
"""Ids of what the format calls processes: groups of lanes."""
NAMES = {ITERATIONS: "iterations", 2: "trainer", 3: "generators", 4: "stage workers"}


def perfetto_trace(report: TimelineReport) -> dict[str, Any]:
    """Returns the trace as a JSON object. Times count from the first span, in microseconds."""
    starts_s = [span.started_s for span in report.spans]
    starts_s += [iteration.started_s for iteration in report.iterations]
    origin_s = min(starts_s, default=0.0)
    threads = _threads(report)
    critical = set(report.critical)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for pid, name in NAMES.items()
    ]
    named: dict[tuple[int, int], str] = {(ITERATIONS, 1): "iterations"}
    for span, (pid, tid, row) in zip(report.spans, threads, strict=True):
        named[pid, tid] = f"{span.who} ({row + 1})" if row else span.who
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        for (pid, tid), name in named.items()
    ]
    for iteration in report.iterations:
        place = {"pid": ITERATIONS, "tid": 1, "ts": _micros(iteration.started_s - origin_s)}
        lasts = _micros(iteration.ended_s - iteration.started_s)
        events.append(
            {"ph": "X", "name": f"iteration {iteration.iteration}", "cat": "iteration", "dur": lasts, **place}
        )
    for at, (span, (pid, tid, _)) in enumerate(zip(report.spans, threads, strict=True)):
        events.append(
            {
                "ph": "X",
                "name": name_of(span),
                "cat": f"{span.what},critical" if at in critical else span.what,
                "ts": _micros(span.started_s - origin_s),
                "dur": _micros(span.ended_s - span.started_s),
                "pid": pid,
                "tid": tid,
                "args": {"iteration": span.iteration, "batch": span.batch_id, "critical": at in critical},
            }
        )
    events += _arrows(report, threads, origin_s)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"job": report.job_id, "started_at_unix_s": origin_s, "words": report.words},
    }


def _arrows(report: TimelineReport, threads: Sequence[tuple[int, int, int]], origin_s: float) -> list[dict[str, Any]]:
    """An arrow from each span of the critical path to the one that waited for it."""
    events = []
    for number, (before, after) in enumerate(pairwise(report.critical)):
        sooner = report.spans[before]
        later = report.spans[after]
        common = {"name": "critical path", "cat": "critical", "id": number}
        # An end binds to the slice around it: a microsecond inside of both.
        left_s = max(sooner.started_s, sooner.ended_s - 1e-6)
        came_s = max(later.started_s, min(later.ended_s, left_s + 1e-6))
        events.append({"ph": "s", **common, **_at(threads[before]), "ts": _micros(left_s - origin_s)})
        events.append({"ph": "f", "bp": "e", **common, **_at(threads[after]), "ts": _micros(came_s - origin_s)})
    return events


def _threads(report: TimelineReport) -> list[tuple[int, int, int]]:
    """(process, thread, row of its lane) of each span: the first row of the lane that is free when it starts."""
    first = {lane.who: number for number, lane in enumerate(report.lanes)}
    taken: dict[str, list[tuple[float, int]]] = defaultdict(list)  # heaps: (until when, row)
    free: dict[str, list[int]] = defaultdict(list)
    places = []
    for span in report.spans:  # by start
        rows = taken[span.who]
        left = free[span.who]
        while rows and rows[0][0] <= span.started_s:
            heappush(left, heappop(rows)[1])
        row = heappop(left) if left else len(rows)
        heappush(rows, (span.ended_s, row))
        places.append((PROCESSES[kind_of(span.who)], 1 + len(first) * row + first.get(span.who, 0), row))
    return places


def _at(place: tuple[int, int, int]) -> dict[str, int]:
    return {"pid": place[0], "tid": place[1]}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
