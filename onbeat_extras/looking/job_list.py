"""`onbeat jobs`: the jobs of a stack."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from contracts.jobs import JobState
from onbeat.commands import options
from onbeat.terminal.job_view import show_jobs
from onbeat.terminal.output import console_for, emit


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
