"""`onbeat delete`: ended jobs go for good."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from contracts.errors import InvalidInput
from onbeat.commands import options
from onbeat.terminal.output import console_for, emit


def delete(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of ended jobs.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Delete ended jobs for good: status, audit chain, run folder with the trained weights."""
    access = options.access_from(gateway, api_key, run_dir)
    if not yes:
        _ask(jobs, json_output=json_output)
    deleted: list[str] = []
    with options.client_for(access) as client:
        for job_id in jobs:
            client.of_job("DELETE", job_id)  # may be repeated
            deleted.append(job_id)
            if not json_output:
                console_for(json_output=False).print(f"{job_id}  deleted", markup=False)
    if json_output:
        emit({"deleted": deleted})


def _ask(jobs: list[str], *, json_output: bool) -> None:
    """Raises InvalidInput where no person can answer, typer.Abort where one says no."""
    if json_output or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InvalidInput(
            "a deleted job cannot be restored, nor its weights and checkpoints",
            field="--yes",
            cure="add --yes to delete",
        )
    what = jobs[0] if len(jobs) == 1 else f"{len(jobs)} jobs"
    typer.confirm(f"Delete {what} with all weights and checkpoints?", abort=True, err=True)
