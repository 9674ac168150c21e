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
"""The spans that a generator reports by itself; when it sampled and scored a batch stands in the batch."""
COMPUTE = "compute"
"""First word of `what` of a stage worker's spans; the stage's name is the second."""
STAGE_WORKER = "stage"
"""First word of `who` of a stage worker's spans; its id is the second."""

LaneKind = Literal["generator", "rank", "stage"]


def is_of_the_pipeline(span: TimelineSpan) -> bool:
    """Returns True for what `onbeat plan` reads: sampled and scored batches, and the passes and steps of ranks."""
    return span.what in ("generate", "score", "train", "step", "sync", "open")


def kind_of(who: str) -> LaneKind:
    """Returns the kind of process that a span's `who` names: a rank of the trainer, a stage worker, or a generator."""
    if who == TRAINER or who.startswith(f"{TRAINER} "):
        return "rank"
    if who.startswith(f"{STAGE_WORKER} "):
        return "stage"
    return "generator"


def is_reported(span: TimelineSpan) -> bool:
    """Returns True for a span of a kind that its process reports by itself, next to the batches."""
    kind = kind_of(span.who)
    if kind == "stage":
        return span.what.startswith(f"{COMPUTE} ")
    return kind == "generator" and span.what in REPORTED


def latest_spans(lines: Sequence[TimelineSpan]) -> list[TimelineSpan]:
    """Returns the spans by their start, each once, without those of a trainer that died before it stepped.

    A replay writes an iteration's lines again.
    """
    stepped = {span.iteration: span.started_s for span in lines if span.what == "step"}
    last = {(span.iteration, span.who, span.what, span.batch_id, span.started_s): span for span in lines}
    newest = [span for span in last.values() if span.iteration not in stepped or not _is_older(span, stepped)]
    return sorted(newest, key=lambda span: span.started_s)


def _is_older(span: TimelineSpan, stepped: dict[int, float]) -> bool:
    """Returns True where a span ended before the iteration before it was stepped last: it is another attempt's."""
    before = stepped.get(span.iteration - 1)
    is_trainers = kind_of(span.who) == "rank" and span.what in ("train", "step", "sync", "checkpoint")
    return before is not None and is_trainers and span.ended_s < before


def covered_s(times: Iterable[tuple[float, float]]) -> float:
    """Returns the seconds that lie in at least one of the times, which are (start, end)."""
    covered = 0.0
    until_s = float("-inf")  # the end of the times that are covered so far
    for started_s, ended_s in sorted(times):
        covered += max(0.0, ended_s - max(started_s, until_s))
        until_s = max(until_s, ended_s)
    return covered
