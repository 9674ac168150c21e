"""Sums over the spans of a timeline: pure functions, which read no file and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contracts.events import TimelineSpan
from contracts.timeline import kind_of


def latest_spans(lines: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """By start, each once, without what a trainer that died had written: a replay writes an iteration's lines again."""
    stepped = {span.iteration: span.started_s for span in lines if span.what == "step"}
    last = {(span.iteration, span.who, span.what, span.batch_id, span.started_s): span for span in lines}
    newest = [span for span in last.values() if span.iteration not in stepped or not _is_older(span, stepped)]
    return sorted(newest, key=lambda span: span.started_s)


def _is_older(span: TimelineSpan, stepped: dict[int, float]) -> bool:
    """Whether it ended before the iteration before it was stepped for the last time: another attempt's."""
    before = stepped.get(span.iteration - 1)
    is_trainers = kind_of(span.who) == "rank" and span.what in ("train", "step", "sync", "checkpoint")
    return before is not None and is_trainers and span.ended_s < before


def covered_s(times: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds that lie in at least one of the times, which are (start, end)."""
    covered, until_s = 0.0, float("-inf")
    for started_s, ended_s in sorted(times):
        covered += max(0.0, ended_s - max(started_s, until_s))
        until_s = max(until_s, ended_s)
    return covered
