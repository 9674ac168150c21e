"""The words of timeline spans: who does what, what a wait is; and sums over spans, which read no file and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from contracts.events import TimelineSpan

TRAINER = "trainer"
"""`who` of the spans of the trainer's rank 0; those of rank 1, or of its second thread, are of `trainer 1`."""
WAIT = "wait"
"""`what` of a span in which a process had nothing to do."""
REPORTED = ("load", "publish", WAIT)
"""What a generator reports by itself; when it sampled and scored a batch stands in the batch."""
COMPUTE = "compute"
"""First word of `what` of a stage worker's spans; the stage's name is the second."""
STAGE_WORKER = "stage"
"""First word of `who` of a stage worker's spans; its id is the second."""

LaneKind = Literal["generator", "rank", "stage"]


def is_of_the_pipeline(span: TimelineSpan) -> bool:
    """Returns True for what a plan reads: batches that are sampled and scored, and the passes and steps of ranks."""
    return span.what in ("generate", "score", "train", "step", "sync", "open")


def kind_of(who: str) -> LaneKind:
    """Whether a span's `who` is a rank of the trainer, or a stage worker; every other one is a generator."""
    if who == TRAINER or who.startswith(f"{TRAINER} "):
        return "rank"
    return "stage" if who.startswith(f"{STAGE_WORKER} ") else "generator"


def is_reported(span: TimelineSpan) -> bool:
    """Whether it is a kind that its process reports by itself, beside the batches."""
    kind = kind_of(span.who)
    if kind == "stage":
        return span.what.startswith(f"{COMPUTE} ")
    return kind == "generator" and span.what in REPORTED


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
