"""The end of a command that has submitted or resumed a job: it follows the job, or says how to follow it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import typer
from msgspec import to_builtins
from rich.text import Text

from contracts.jobs import JobState, JobStatus
from onbeat.client.gateway import GatewayClient
from onbeat.stack.access import run_dir_flag, run_root_from
from onbeat.terminal.follow import follow
from onbeat.terminal.job_view import NoView, dead_letter_table, health_lines, past_health_lines
from onbeat.terminal.output import FAILED, console_for, emit, tell
from onbeat.terminal.panel import view_for
from onbeat.terminal.words import UNKNOWN, one_line, plural

MAX_LETTERS = 20
"""Batches that were given up which are shown at the end of a job, the newest first."""


def follow_or_show(
    client: GatewayClient, status: JobStatus, run_dir: Path | None, *, wait: bool, json_output: bool
) -> None:
    """Tells of a job that was queued, or with --wait of its end."""
    if wait:
        follow_to_end(client, status.job_id, json_output=json_output)
        return
    flag = run_dir_flag(os.environ, run_root_from(os.environ, run_dir))
    shown = f"{status.job_id}  {status.state.value}   follow it: onbeat watch {status.job_id}{flag}"
    tell(status, shown, json_output=json_output)


def follow_to_end(client: GatewayClient, job_id: str, *, json_output: bool, is_quiet: bool = False) -> JobStatus:
    """Follows a job, and prints how it ended. is_quiet: of what comes before the end nothing is shown.

    Returns the job's status at its end. Raises Exit, with the exit code of a failed job, unless it succeeded.
    """
    console = console_for(json_output=json_output)
    try:
        with contextlib.nullcontext(NoView()) if is_quiet else view_for(console) as view:
            progress = follow(client, job_id, view=view)
    except KeyboardInterrupt:
        sys.stderr.write(f"{job_id} goes on: onbeat watch {job_id}, or onbeat cancel {job_id}\n")
        raise
    status = progress.status
    letters = ()
    if status.batches_dead:
        letters = client.dead_letters(job_id, limit=MAX_LETTERS)
    if json_output:
        emit({**to_builtins(status), "dead_letters": to_builtins(letters)})
    else:
        digest = f"version {status.policy_version}   weights digest {status.weights_digest or UNKNOWN}"
        console.print(f"{status.job_id}  {status.state.value}   {one_line(status.reason) or digest}", soft_wrap=True)
        for line in (*health_lines(status), *past_health_lines(status)):
            console.print(line, soft_wrap=True)
        if letters:
            console.print(Text(f"\n{plural(status.batches_dead, 'batch')} given up; the newest:\n"))
        for letter in letters:
            console.print(dead_letter_table(letter))
    if status.state is not JobState.SUCCEEDED:
        raise typer.Exit(FAILED)
    return status
