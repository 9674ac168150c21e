"""The last iterations of a job as lanes, with the idle share of each, the critical path, and what both say in words.

An iteration is the trainer's from the start of its `open` span, which commits the one before, to that of the next; the
first one of a trainer begins with its first span, and the last one ends with its last. A lane is busy while any of its
spans lasts but a wait. A generator of a job with a lag samples ahead, and its batches become known with the commit of
their own iteration: while such a job runs, the newest `max_policy_lag` iterations are left out, since the lanes of the
generators would look idle in them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from contracts.encoding.wire import Record
from contracts.events import TimelineSpan
from contracts.timeline import WAIT, LaneKind, covered_s, kind_of, latest_spans
from gateway.timeline.critical_path import PathStep, critical_path

KINDS: tuple[LaneKind, ...] = ("rank", "stage", "generator")
"""In the order in which their lanes are shown."""
BETWEEN_SHARE = 0.1
"""Share of the path that lies between spans from which on the words say so."""


class Lane(Record, frozen=True, kw_only=True):
    """The work of one process over the iterations of a report."""

    who: str
    kind: LaneKind
    busy_s: float
    """Seconds in which it did anything but wait; what it did at the same time counts once."""
    idle_share: float
    """Share of the time from the first iteration's start to the last one's end in which it did nothing."""


class IterationTimes(Record, frozen=True, kw_only=True):
    """The time in which the trainer had an iteration: from the commit of the one before to its own. Unix times."""

    iteration: int
    started_s: float
    ended_s: float


class TimelineReport(Record, frozen=True, kw_only=True):
    """The last iterations of a job as swim lanes."""

    job_id: str
    spans: tuple[TimelineSpan, ...] = ()
    """By start."""
    lanes: tuple[Lane, ...] = ()
    """In the order of KINDS."""
    critical: tuple[int, ...] = ()
    """Indices into spans of those that what came after them waited for, in the order of time."""
    iterations: tuple[IterationTimes, ...] = ()
    """Oldest first."""
    words: str


def timeline_report(job_id: str, lines: Sequence[TimelineSpan], *, last: int, left_out: int = 0) -> TimelineReport:
    """Returns the report of the last iterations that are done.

    Args:
        lines: Of timeline.jsonl; its end is enough.
        last: How many iterations.
        left_out: How many of the newest iterations aren't shown, see above.
    """
    spans = latest_spans(lines)
    shown = iteration_times(spans)
    shown = shown[: max(1, len(shown) - left_out)][-last:]
    if not shown:
        return TimelineReport(job_id=job_id, words="no iteration is done yet")
    since_s = shown[0].started_s
    until_s = shown[-1].ended_s
    # What began before the first of them, and what goes on after the last, belongs to what happened in them.
    in_window = tuple(span for span in spans if span.started_s < until_s and span.ended_s > since_s)
    lanes = lanes_of(in_window, since_s=since_s, until_s=until_s)
    path = critical_path(in_window, last_iteration=shown[-1].iteration, since_s=since_s, until_s=until_s)
    return TimelineReport(
        job_id=job_id,
        spans=in_window,
        lanes=lanes,
        critical=tuple(step.place for step in path),
        iterations=tuple(shown),
        words=in_words(in_window, lanes, path, shown),
    )


def iteration_times(spans: Sequence[TimelineSpan]) -> list[IterationTimes]:
    """Returns start and end of each iteration that has ended, oldest first.

    Args:
        spans: As `latest_spans` answers them.
    """
    of_ranks: dict[int, list[TimelineSpan]] = defaultdict(list)
    of_all: dict[int, list[TimelineSpan]] = defaultdict(list)
    for span in spans:
        of_all[span.iteration].append(span)
        if kind_of(span.who) == "rank":
            of_ranks[span.iteration].append(span)
    starts: dict[int, float] = {}
    for number, spans_of_it in sorted(of_all.items()):
        if number in of_ranks:
            opened = [span.started_s for span in of_ranks[number] if span.what == "open"]
            if opened:
                starts[number] = opened[-1]
                continue
            # Without an opening it starts with the first work on it, and not with a worker's wait for it.
            works = [span for span in spans_of_it if span.what != WAIT or kind_of(span.who) == "rank"]
            starts[number] = min(span.started_s for span in works)
    ends = {sooner: starts[later] for sooner, later in pairwise(starts) if later == sooner + 1}
    times = []
    for number, started_s in starts.items():
        # After a gap in the numbers, as after the last one, it ends with what it did itself.
        ended_s = ends.get(number, max(span.ended_s for span in of_ranks[number]))
        if ended_s > started_s:
            times.append(IterationTimes(iteration=number, started_s=started_s, ended_s=ended_s))
    return times


def lanes_of(spans: Iterable[TimelineSpan], *, since_s: float, until_s: float) -> tuple[Lane, ...]:
    """Returns the lanes in the order of KINDS, and of one kind in the order of their names."""
    work: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        times = work.setdefault(span.who, [])
        if span.what != WAIT:
            times.append((max(since_s, span.started_s), min(until_s, span.ended_s)))
    lanes = []
    for who, times in work.items():
        busy_s = covered_s(times)
        idle_share = 1.0 - busy_s / (until_s - since_s)
        lanes.append(Lane(who=who, kind=kind_of(who), busy_s=round(busy_s, 4), idle_share=round(idle_share, 4)))
    return tuple(sorted(lanes, key=lambda lane: (KINDS.index(lane.kind), _in_order(lane.who))))


def in_words(
    spans: Sequence[TimelineSpan], lanes: Sequence[Lane], path: Sequence[PathStep], shown: Sequence[IterationTimes]
) -> str:
    """Returns `g2 was idle 31 % of the last 3 iterations; the longest wait was for batch 7/train/2 (generate) …`"""
    number = len(shown)
    which = "the last iteration" if number == 1 else f"the last {number} iterations"
    parts = []
    if lanes:
        idlest = max(lanes, key=lambda lane: lane.idle_share)
        parts.append(f"{idlest.who} was idle {idlest.idle_share:.0%} of {which}".replace("%", " %"))
    if path:
        whole_s = shown[-1].ended_s - shown[0].started_s
        longest = max(path, key=lambda step: step.until_s - step.since_s)
        longest_s = longest.until_s - longest.since_s
        awaited = name_of(spans[longest.place])
        parts.append(f"the longest wait was for {awaited}, {longest_s:.2g} s of {whole_s:.3g} s")
        parts.append(f"the critical path is {_by_kind(spans, path, whole_s)}")
    return "; ".join(parts)


def name_of(span: TimelineSpan) -> str:
    """`batch 7/train/2 (generate)`, or `iteration 7 (step)` where it is of no batch."""
    if span.batch_id:
        return f"batch {span.batch_id} ({span.what})"
    return f"iteration {span.iteration} ({span.what})"


def _by_kind(spans: Sequence[TimelineSpan], path: Sequence[PathStep], whole_s: float) -> str:
    """`62 % generate, 21 % train, 9 % step`: the three largest, and what lies between spans where it is much."""
    of_kind: dict[str, float] = defaultdict(float)
    for step in path:
        of_kind[spans[step.place].what] += step.until_s - step.since_s
    shares = sorted(((seconds / whole_s, what) for what, seconds in of_kind.items()), reverse=True)[:3]
    words = [f"{round(100 * share)} % {what}" for share, what in shares]
    between = 1.0 - sum(of_kind.values()) / whole_s
    if between >= BETWEEN_SHARE:
        words.append(f"{round(100 * between)} % between spans")
    return ", ".join(words)


def _in_order(who: str) -> tuple[str, int]:
    """`trainer 10` after `trainer 2`."""
    name, _, number = who.rpartition(" ")
    return (name, int(number)) if name and number.isdecimal() else (who, 0)
