"""`onbeat jobs`: the jobs of a stack, and by --tasks its tasks."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from contracts.tasks.kinds import TaskKind, TaskState
from onbeat.commands import options
from onbeat.commands.tasks import show_tasks
from onbeat.terminal.job_view import STATE_STYLES, health_lines
from onbeat.terminal.output import console_for, emit, tell_page
from onbeat.terminal.words import UNKNOWN, ago, duration, one_line, score, short, size

S = TypeVar("S", JobState, TaskState)
COLUMNS = {
    "job": 0,
    "state": 0,
    "iterations": 0,
    "held-out": 0,
    "submitted": 0,
    "took": 96,
    "disk": 0,
    "name": 0,
    "digest": 108,
}
"""Column of the list → the width of a terminal, in columns, from which on it is shown: below, the name needs the
room."""
WHOLE = 4096
"""Columns of a file or a pipe, beyond the longest value: a reader of lines gets each cell whole."""


def jobs(
    task: Annotated[str, typer.Argument(metavar="[TASK]", help="With --tasks: show this one, whole.")] = "",
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help="Only jobs, or tasks, in this state; may be repeated."),
    ] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Only jobs with the text in their names.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="At most so many.")] = 100,
    shows_tasks: Annotated[
        bool,
        typer.Option(
            "--tasks",
            help="List the tasks instead: checks, exports, backups and removals, how far each is, and why it waits or "
            "has failed.",
        ),
    ] = False,
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="With --tasks: only the tasks of this job.")] = "",
    kind: Annotated[
        list[TaskKind] | None,
        typer.Option("--kind", help="With --tasks: only tasks of this kind; may be repeated."),
    ] = None,
    cancel: Annotated[
        str,
        typer.Option(
            "--cancel", metavar="TASK", help="With --tasks: end this one, at once where it waits, else within seconds."
        ),
    ] = "",
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """List the jobs, newest first, with times, results, and why one waits or has failed; --tasks lists tasks."""
    access = options.access_from(gateway, api_key, run_dir)
    if shows_tasks:
        if name:
            raise InvalidInput("applies to jobs only", field="--name", cure="leave it out, or name a job by --job")
        show_tasks(
            access,
            task=task,
            cancel=cancel,
            job=job,
            states=_states_of(TaskState, state),
            kinds=kind or (),
            limit=limit,
            json_output=json_output,
        )
        return
    _refuse_flags_of_tasks(task=task, cancel=cancel, job=job, kinds=kind or ())
    states = _states_of(JobState, state)
    with options.client_for(access) as client:
        jobs = client.jobs(limit=limit, states=states, name=name)
    console = console_for(json_output=False)
    if json_output:
        emit({"jobs": jobs})
        return
    if jobs:
        show_jobs(jobs, console, now_s=time.time())
    else:
        nothing = "no jobs yet: onbeat submit SPEC"
        if state or name:
            nothing = "no job is like that"
        console.print(nothing)
    # A program that reads the list from a pipe asks for no page.
    if console.is_terminal:
        tell_page(console, access.url, access.key)


def _states_of(kind: type[S], values: Iterable[str] | None) -> list[S]:
    """Returns the states that --state names. Raises InvalidInput for one that jobs, or tasks, don't have."""
    names = [state.value for state in kind]
    for value in values or ():
        if value not in names:
            raise InvalidInput(f"`{one_line(value)}` is not one of {', '.join(names)}", field="--state")
    return [kind(value) for value in values or ()]


def _refuse_flags_of_tasks(*, task: str, cancel: str, job: str, kinds: Collection[TaskKind]) -> None:
    """Raises InvalidInput for what has an effect with --tasks alone."""
    if task:
        cure = f"onbeat watch {task} shows a job, onbeat jobs --tasks {task} a task"
        raise InvalidInput("lists all jobs, and takes the id of none", field="onbeat jobs", cure=cure)
    for flag, is_set in (("--cancel", cancel), ("--job", job), ("--kind", kinds)):
        if is_set:
            raise InvalidInput("is a flag of --tasks", field=flag, cure="add --tasks, or leave it out")


def show_jobs(jobs: Iterable[JobStatus], console: Console, *, now_s: float) -> None:
    """Prints the jobs in their order, and below the table why some wait, have failed or aren't well."""
    jobs = list(jobs)
    if not console.is_terminal:
        console.width = WHOLE
    table = job_table(jobs, width=console.width, now_s=now_s)
    table.expand = console.is_terminal
    console.print(table)
    for status in jobs:
        if status.reason:
            line = Text.assemble("\n", status.job_id, "  ", (status.state.value, STATE_STYLES[status.state]))
            console.print(line.append(f": {one_line(status.reason)}"), soft_wrap=not console.is_terminal)
        for problem in health_lines(status):
            console.print(Text.assemble("\n", status.job_id, "  ").append(problem), soft_wrap=not console.is_terminal)


def job_table(jobs: Iterable[JobStatus], *, width: int, now_s: float) -> Table:
    """Returns a table of the jobs, with the columns that fit.

    Args:
        jobs: In the order of the rows.
        width: Of the terminal, in columns.
        now_s: The present, in Unix seconds.
    """
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    columns = [name for name, needed in COLUMNS.items() if width >= needed]
    jobs = list(jobs)
    least = max((len(status.job_id) for status in jobs), default=0)  # an id that is cut names no job
    for column in columns:
        ratio = 1 if column == "name" else None
        min_width = least if column == "job" else None
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=min_width)
    for status in jobs:
        latest = status.evaluation_latest
        cells = {
            "job": status.job_id,
            "state": Text(status.state.value, STATE_STYLES[status.state]),
            "iterations": f"{status.iterations_committed}/{status.iterations}",
            "held-out": score(latest.sampled if latest else None),
            "submitted": ago(status.created_s, now_s),
            "took": _took(status, now_s),
            "disk": UNKNOWN if status.disk_bytes is None else size(status.disk_bytes),
            "name": one_line(status.name),
            "digest": short(status.weights_digest),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _took(status: JobStatus, now_s: float) -> str:
    """Returns the time from the start of the first trainer to the end, or to now."""
    if not status.started_s:
        return UNKNOWN
    return duration(max(0.0, (status.ended_s or now_s) - status.started_s))
