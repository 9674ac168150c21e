"""What the gateway reads from a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contracts.encoding.json_lines import last_json_line, last_json_lines, read_json_lines
from contracts.errors import Unavailable
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder

FIRST_TAIL_BYTES = 256 * 1024
LONGEST_TAIL_BYTES = 32 * 1024 * 1024
"""What is read of a timeline at most, however many iterations are asked for."""


def newest_metrics(folder: RunFolder) -> IterationMetrics | None:
    """None before the first iteration."""
    with _readable():
        return last_json_line(folder.metrics, IterationMetrics)


def iteration_metrics(folder: RunFolder) -> list[IterationMetrics]:
    """Returns them in order; the last line of an iteration wins, since a replay writes it again.

    A line that a dying trainer tore is left out: its iteration is not committed, and is written again when it is.
    """
    with _readable():
        found = {metrics.iteration: metrics for metrics in read_json_lines(folder.metrics, IterationMetrics)}
    return [found[iteration] for iteration in sorted(found)]


def timeline_end(folder: RunFolder, *, iterations: int) -> list[TimelineSpan]:
    """The end of the job's timeline, which has at least the last so many iterations where the file has them."""
    max_bytes = FIRST_TAIL_BYTES
    while True:
        with _readable("timeline.jsonl"):
            spans, is_whole = last_json_lines(folder.timeline, TimelineSpan, max_bytes=max_bytes)
        # The first iteration that is found may have its first lines before what was read.
        if is_whole or max_bytes >= LONGEST_TAIL_BYTES or len({span.iteration for span in spans}) > iterations:
            return spans
        max_bytes *= 4


@contextmanager
def _readable(name: str = "metrics.jsonl") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field=name) from error
