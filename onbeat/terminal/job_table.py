"""The list of jobs as a table, newest first, that fits the terminal; beneath it why jobs wait or have failed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.jobs import JobStatus
from onbeat.terminal.job_view import STATE_STYLES
from onbeat.terminal.words import UNKNOWN, ago, duration, one_line, score, short

WIDE = 108
"""Columns from which there is room for digests; a file or a pipe has room for all."""


def show_jobs(found: Iterable[JobStatus], console: Console, *, now_s: float) -> None:
    """Prints the jobs in the order given."""
    found = list(found)
    if not console.is_terminal:
        console.width = max(console.width, WIDE + 60)
    table = job_table(found, is_wide=console.width >= WIDE, now_s=now_s)
    table.expand = console.is_terminal
    console.print(table)
    for status in found:
        if status.reason:
            line = Text.assemble("\n", status.job_id, "  ", (status.state.value, STATE_STYLES[status.state]))
            console.print(line.append(f": {one_line(status.reason)}"), soft_wrap=not console.is_terminal)


def job_table(found: Iterable[JobStatus], *, is_wide: bool, now_s: float) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    columns = ["job", "state", "iterations", "held-out", "submitted", "took", "name"]
    for column in [*columns, "digest"] if is_wide else columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1 if column == "name" else None)
    for status in found:
        latest = status.evaluation_latest
        row = [
            status.job_id,
            Text(status.state.value, STATE_STYLES[status.state]),
            f"{status.iterations_committed}/{status.iterations}",
            score(latest.sampled if latest else None),
            ago(status.created_s, now_s),
            _took(status, now_s),
            one_line(status.name),
        ]
        table.add_row(*row, *([short(status.weights_digest)] if is_wide else []))
    return table


def _took(status: JobStatus, now_s: float) -> str:
    """From the start of the first trainer to the end, or to now."""
    if not status.started_s:
        return UNKNOWN
    return duration(max(0.0, (status.ended_s or now_s) - status.started_s))
