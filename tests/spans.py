"""Small timelines, drawn by hand."""

from __future__ import annotations

from contracts.events import TimelineSpan


def span(who: str, what: str, started_s: float, ended_s: float, batch: str = "", iteration: int = 0) -> TimelineSpan:
    batch_id = f"{iteration}/train/{batch}" if batch else ""
    return TimelineSpan(
        who=who, what=what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=ended_s
    )


def one_iteration(at_s: float = 0.0, number: int = 0) -> list[TimelineSpan]:
    """Two generators sample three batches; the trainer trains them, steps and publishes, and is idle in between.

    g1        |gen 0....|s|p|gen 2..........|s|p|
    g2        |gen 1.....|s|p|      wait
    trainer   |   wait      |tr 0|tr 1| wait    |tr 2|step|pub|
    seconds   0         2       3     4           6    7    8   8.5
    """
    rows = [
        ("g1", "generate", 0.0, 2.0, "0"),
        ("g1", "score", 2.0, 2.2, "0"),
        ("g1", "publish", 2.2, 2.3, "0"),
        ("g1", "generate", 2.0, 5.6, "2"),
        ("g1", "score", 5.6, 5.8, "2"),
        ("g1", "publish", 5.8, 5.9, "2"),
        ("g2", "generate", 0.0, 2.1, "1"),
        ("g2", "score", 2.1, 2.4, "1"),
        ("g2", "publish", 2.4, 2.5, "1"),
        ("g2", "wait", 2.5, 8.6, ""),
        ("trainer", "wait", 0.0, 2.3, ""),
        ("trainer", "train", 2.3, 3.0, "0"),
        ("trainer", "train", 3.0, 3.7, "1"),
        ("trainer", "wait", 3.7, 5.9, ""),
        ("trainer", "train", 5.9, 7.0, "2"),
        ("trainer", "step", 7.0, 8.0, ""),
        ("trainer", "sync", 8.0, 8.5, ""),
    ]
    spans = [span(who, what, at_s + start, at_s + end, batch, number) for who, what, start, end, batch in rows]
    if number:
        spans.append(span("trainer", "open", at_s - 0.1, at_s, iteration=number))
    return spans
