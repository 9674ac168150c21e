"""`onbeat jobs`: the jobs of a stack."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.jobs import JobState, JobStatus
from onbeat.commands import options
from onbeat.terminal.job_view import STATE_STYLES, health_lines
from onbeat.terminal.output import console_for, emit
from onbeat.terminal.words import UNKNOWN, ago, duration, one_line, score, short, size

WIDE = 108
"""Columns from which there is room for digests; a file or a pipe has room for all."""


def jobs(
    state: Annotated[
        list[JobState] | None, typer.Option("--state", help="Only jobs in this state; may be repeated.")
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Only jobs with the text in their names.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = 100,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """List the jobs, newest first: when each was submitted, how long it took, and why it waits or has failed."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        found = client.jobs(limit=limit, states=state or (), name=name)
    if json_output:
        emit({"jobs": found})
    elif found:
        show_jobs(found, console_for(json_output=False), now_s=time.time())
    else:
        nothing = "no job is like that" if state or name else "no jobs yet: onbeat submit SPEC"
        console_for(json_output=False).print(nothing)


def show_jobs(found: Iterable[JobStatus], console: Console, *, now_s: float) -> None:
    """Prints the jobs in the order given."""
    found = list(found)
    if not console.is_terminal:
        console.width = 4096  # beyond the longest name: a reader of lines gets each cell whole
    table = job_table(found, is_wide=console.width >= WIDE, now_s=now_s)
    table.expand = console.is_terminal
    console.print(table)
    for status in found:
        if status.reason:
            line = Text.assemble("\n", status.job_id, "  ", (status.state.value, STATE_STYLES[status.state]))
            console.print(line.append(f": {one_line(status.reason)}"), soft_wrap=not console.is_terminal)
        for problem in health_lines(status):
            console.print(Text.assemble("\n", status.job_id, "  ").append(problem), soft_wrap=not console.is_terminal)


def job_table(found: Iterable[JobStatus], *, is_wide: bool, now_s: float) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    columns = ["job", "state", "iterations", "held-out", "submitted", "took", "disk", "name"]
    found = list(found)
    least = max((len(status.job_id) for status in found), default=0)  # an id that is cut names no job
    for column in [*columns, "digest"] if is_wide else columns:
        ratio, width = 1 if column == "name" else None, least if column == "job" else None
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=width)
    for status in found:
        latest = status.evaluation_latest
        row = [
            status.job_id,
            Text(status.state.value, STATE_STYLES[status.state]),
            f"{status.iterations_committed}/{status.iterations}",
            score(latest.sampled if latest else None),
            ago(status.created_s, now_s),
            _took(status, now_s),
            UNKNOWN if status.disk_bytes is None else size(status.disk_bytes),
            one_line(status.name),
        ]
        table.add_row(*row, *([short(status.weights_digest)] if is_wide else []))
    return table


def _took(status: JobStatus, now_s: float) -> str:
    """From the start of the first trainer to the end, or to now."""
    if not status.started_s:
        return UNKNOWN
    return duration(max(0.0, (status.ended_s or now_s) - status.started_s))
