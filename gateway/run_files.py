"""What the gateway reads from a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from contextlib import contextmanager

from contracts.answers import LogPart
from contracts.encoding.json_lines import last_json_line, last_json_lines, open_plain, read_json_lines
from contracts.errors import Unavailable
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder

FIRST_TAIL_BYTES = 256 * 1024
LONGEST_TAIL_BYTES = 32 * 1024 * 1024
"""What is read of a timeline at most, however many iterations are asked for."""


def newest_metrics(folder: RunFolder) -> IterationMetrics | None:
    """None before the first iteration."""
    with readable():
        return last_json_line(folder.metrics, IterationMetrics)


def iteration_metrics(folder: RunFolder) -> list[IterationMetrics]:
    """Returns them in order; the last line of an iteration wins, since a replay writes it again.

    A line that a dying trainer tore is left out: its iteration is not committed, and is written again when it is.
    """
    with readable():
        found = {metrics.iteration: metrics for metrics in read_json_lines(folder.metrics, IterationMetrics)}
    return [found[iteration] for iteration in sorted(found)]


def timeline_end(folder: RunFolder, *, iterations: int) -> list[TimelineSpan]:
    """The end of the job's timeline, which has at least the last so many iterations where the file has them."""
    max_bytes = FIRST_TAIL_BYTES
    while True:
        with readable("timeline.jsonl"):
            spans, is_whole = last_json_lines(folder.timeline, TimelineSpan, max_bytes=max_bytes)
        # The first iteration that is found may have its first lines before what was read.
        if is_whole or max_bytes >= LONGEST_TAIL_BYTES or len({span.iteration for span in spans}) > iterations:
            return spans
        max_bytes *= 4


def evaluations(folder: RunFolder) -> list[EvaluationScore]:
    """Returns them in order; the last line of an iteration wins, as of its metrics."""
    with readable("evaluations.jsonl"):
        found = {score.iteration: score for score in read_json_lines(folder.evaluations, EvaluationScore)}
    return [found[iteration] for iteration in sorted(found)]


def trainer_log(folder: RunFolder, *, after: int, limit: int) -> LogPart:
    """Returns at most `limit` bytes behind the first `after` ones; a place beyond the end is the end."""
    with readable("trainer.log"):
        try:
            opened = open_plain(folder.trainer_log)
        except FileNotFoundError:
            return LogPart(text="", after=0, next=0, size=0)
    with readable("trainer.log"), opened as file:
        size = file.seek(0, os.SEEK_END)
        after = file.seek(min(after, size))
        data = file.read(min(limit, size - after))
    if after + limit < size and (end := data.rfind(b"\n") + 1):
        data = data[:end]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(data)
    cut = len(decoder.getstate()[0])  # of a character that goes on in the next part
    if cut == len(data):
        text, cut = data.decode(errors="replace"), 0
    return LogPart(text=text, after=after, next=after + len(data) - cut, size=size)


@contextmanager
def readable(name: str = "metrics.jsonl") -> Iterator[None]:
    """Raises Unavailable, with the reason, where a file or folder of a job can't be read."""
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field=name) from error
