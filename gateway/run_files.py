"""What the gateway reads from a run folder, which the trainer may be writing at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from contracts.encoding.json_lines import last_json_line, read_json_lines
from contracts.errors import Unavailable
from contracts.events import IterationMetrics
from contracts.run_folder import RunFolder


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


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable(f"cannot be read: {error.strerror}", field="metrics.jsonl") from error
