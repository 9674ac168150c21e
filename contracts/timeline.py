"""The words of timeline spans: who does what, and what a wait is."""

from __future__ import annotations

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
    """Whether it is what a plan simulates: batches that are sampled and scored, and the steps of ranks."""
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
