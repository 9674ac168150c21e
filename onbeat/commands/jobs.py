"""Commands that talk to a gateway about jobs."""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import flag_settings, load_spec
from onbeat.commands import options
from onbeat.commands.options import Job
from onbeat.stack.access import run_dir_flag, run_root_from
from onbeat.terminal.follow import follow
from onbeat.terminal.job_view import health_lines, view_for
from onbeat.terminal.output import FAILED, console_for, emit, tell
from onbeat.terminal.words import UNKNOWN, one_line


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    schedule: options.Schedule = None,
    max_policy_lag: options.MaxPolicyLag = None,
    correction: options.Correction = None,
    iterations: options.Iterations = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same key submits the same job once. [random]")
    ] = None,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Submit a job."""
    flags = flag_settings(
        schedule=schedule, max_policy_lag=max_policy_lag, correction=correction, iterations=iterations, seed=seed
    )
    job_spec = load_spec(spec, [*flags, *(settings or [])])
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        if idempotency_key and not (idempotency_key.isascii() and idempotency_key.isprintable()):
            raise InvalidInput("must be visible ASCII characters", field="--idempotency-key", cure="use a UUID")
        status = client.submit(job_spec, idempotency_key=idempotency_key or uuid.uuid4().hex)
        _follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)


def watch(
    job: Job,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Follow a job to its end; exit code 1 unless it succeeds. Ctrl-C leaves the job running."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        _follow_to_end(client, job, json_output=json_output)


def cancel(
    job: Job,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Cancel a job: its trainer writes a checkpoint and ends."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        status = client.cancel(job)
    tell(status, f"{status.job_id}  {status.state.value}", json_output=json_output)


def resume(
    job: Job,
    iterations: options.Iterations = None,
    on_unscorable: options.OnUnscorableScores = None,
    on_failure: options.OnFailureScores = None,
    wider_sums: options.WiderSums = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Queue a failed or cancelled job again, or give a job more iterations: it goes on from its newest checkpoint."""
    of_components = options.stated_scores_from(on_unscorable or [], "--on-unscorable", e_g="math_verify=0")
    of_others = options.stated_scores_from(on_failure or [], "--on-failure", e_g="environment=0")
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        status = client.resume(
            job, iterations=iterations, on_unscorable=of_components, on_failure=of_others, wider_sums=wider_sums
        )
        _follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)


def _follow_or_show(
    client: GatewayClient, status: JobStatus, run_dir: Path | None, *, wait: bool, json_output: bool
) -> None:
    """Tells of a job that was queued, or with --wait of its end."""
    if wait:
        _follow_to_end(client, status.job_id, json_output=json_output)
        return
    flag = run_dir_flag(os.environ, run_root_from(os.environ, run_dir))
    shown = f"{status.job_id}  {status.state.value}   follow it: onbeat watch {status.job_id}{flag}"
    tell(status, shown, json_output=json_output)


def _follow_to_end(client: GatewayClient, job_id: str, *, json_output: bool) -> None:
    console = console_for(json_output=json_output)
    try:
        with view_for(console) as view:
            progress = follow(client, job_id, view=view)
    except KeyboardInterrupt:
        sys.stderr.write(f"{job_id} goes on: onbeat watch {job_id}, or onbeat cancel {job_id}\n")
        raise
    status = progress.status
    if json_output:
        emit(status)
    else:
        digest = f"version {status.policy_version}   weights digest {status.weights_digest or UNKNOWN}"
        console.print(f"{status.job_id}  {status.state.value}   {one_line(status.reason) or digest}", soft_wrap=True)
        console.print(*health_lines(status), sep="\n", end="\n" * bool(status.health), soft_wrap=True)
    if status.state is not JobState.SUCCEEDED:
        raise typer.Exit(FAILED)
