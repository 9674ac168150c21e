"""`onbeat remove`: makes room for new jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from onbeat.commands import options
from onbeat.terminal.output import console_for, emit


def remove(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of ended jobs.")],
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Forget ended jobs: status, events, audit chain. Their run folders stay."""
    removed: list[str] = []
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        for job_id in jobs:
            client.remove(job_id)
            removed.append(job_id)
            if not json_output:
                console_for(json_output=False).print(f"{job_id}  removed", markup=False)
    if json_output:
        emit({"removed": removed})
