"""`onbeat jobs --tasks`: what the stack's workers of tasks do, have done and are to do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import UNSET
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts.errors import InvalidInput
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskStatus
from onbeat.commands import options
from onbeat.stack.access import GatewayAccess
from onbeat.terminal.output import console_for, emit, tell
from onbeat.terminal.task_view import TASK_STYLES, progress_in_words
from onbeat.terminal.words import ago, duration, one_line, plural, short, size

WHOLE = 4096
"""Columns of a file or a pipe, beyond the longest value: a reader of lines gets each cell whole."""
COLUMNS = ("task", "kind", "state", "job", "who", "asked", "took", "progress")


def show_tasks(
    access: GatewayAccess,
    *,
    task: str,
    cancel: str,
    job: str,
    states: Sequence[TaskState],
    kinds: Sequence[TaskKind],
    limit: int,
    json_output: bool,
) -> None:
    """Lists the tasks of a stack, newest first, shows one of them whole, or asks for its end.

    Args:
        access: The gateway to ask.
        task: The task to show; "" lists them.
        cancel: The task to end; "" ends none.
        job: Lists only this job's; "" lists those of all.
        states: Lists only tasks in one of these; empty lists all.
        kinds: Lists only tasks of one of these; empty lists all.
        limit: The most that are listed.
        json_output: Prints one JSON object.

    Raises:
        InvalidInput: A task is to be shown and another one, or the same, to be ended.
    """
    if cancel and task:
        raise InvalidInput("takes the task itself", field="--cancel", cure=f"onbeat jobs --tasks --cancel {task}")
    with options.client_for(access) as client:
        if cancel:
            status = client.cancel_task(cancel)
            what = "asked to end, and ends within seconds"
            if status.state.is_final:
                what = "cancelled"
            tell(status, Text(f"{status.task_id} is {what}"), json_output=json_output)
            return
        if task:
            status = client.task(task)
            tell(status, task_table(status, now_s=time.time()), json_output=json_output)
            return
        listed = client.tasks(limit=limit, job_id=job, states=states, kinds=kinds)
    if json_output:
        emit({"tasks": listed})
        return
    console = console_for(json_output=False)
    if not console.is_terminal:
        console.width = WHOLE
    nothing = "no tasks yet: onbeat verify JOB, onbeat export JOB DIR"
    if job or states or kinds:
        nothing = "no task is like that"
    console.print(task_list(listed, now_s=time.time()) if listed else nothing)


def task_list(listed: list[TaskStatus], *, now_s: float) -> RenderableType:
    """A row for each task, and a line for each reason."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for status in listed:
        table.add_row(
            status.task_id,
            status.kind.value,
            Text(_state_of(status), TASK_STYLES[status.state]),
            one_line(status.arguments.job_id),
            one_line(status.who),
            ago(status.created_s, now_s),
            _took(status, now_s),
            progress_in_words(status.progress),
        )
    lines = [
        Text.assemble("\n", status.task_id, "  ", (status.state.value, TASK_STYLES[status.state])).append(
            f": {one_line(status.reason)}"
        )
        for status in listed
        if status.reason
    ]
    return Group(table, *lines)


def task_table(status: TaskStatus, *, now_s: float) -> Table:
    """Returns a table of all that is known of a task."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("task", Text(f"{status.task_id}   {status.kind.value}"))
    table.add_row("state", Text(_state_of(status), TASK_STYLES[status.state]))
    if status.reason:
        table.add_row("reason", Text(one_line(status.reason)))
    if status.arguments.job_id:
        table.add_row("job", Text(one_line(status.arguments.job_id)))
    table.add_row("asked by", Text(f"{one_line(status.who)}, {ago(status.created_s, now_s)}"))
    if status.attempts:
        table.add_row("attempts", Text(f"{status.attempts}, by {one_line(status.worker)}"))
        table.add_row("took", Text(_took(status, now_s)))
    if words := progress_in_words(status.progress):
        table.add_row("progress", Text(words))
    for name, value in _result_rows(status):
        table.add_row(name, Text(one_line(value)))
    return table


def _result_rows(status: TaskStatus) -> list[tuple[str, str]]:
    result = status.result
    if result is None:
        return []
    rows: list[tuple[str, str]] = []
    if result.verdict is not UNSET:
        rows.append(("verdict", "verified" if result.verdict.verified else "not verified"))
        rows += [("", line) for line in (*result.verdict.gaps, *result.verdict.notes)]
    if result.exported is not UNSET:
        exported = result.exported
        rows.append(("version", f"{exported.policy_version}, {short(exported.weights_digest)}, of {exported.source}"))
        rows.append(("files", f"{plural(len(exported.files), 'file')}, {size(exported.num_bytes)}"))
        rows.append(("kept until", f"{datetime.fromtimestamp(exported.until_s, UTC):%Y-%m-%d %H:%M} UTC"))
    if result.backup is not UNSET:
        rows.append(("backup", result.backup.directory))
        rows.append(("", f"{plural(result.backup.num_jobs, 'job')}, {size(result.backup.num_bytes)}"))
    if result.num_jobs is not UNSET:
        rows.append(("jobs", str(result.num_jobs)))
    if result.num_bytes is not UNSET:
        rows.append(("freed", size(result.num_bytes)))
    return rows


def _state_of(status: TaskStatus) -> str:
    if status.is_cancelling:
        return f"{status.state.value}, is to end"
    return status.state.value


def _took(status: TaskStatus, now_s: float) -> str:
    """Returns the time from the start of its newest attempt to its end, or to now."""
    if not status.started_s:
        return ""
    return duration(max(0.0, (status.ended_s or now_s) - status.started_s))
