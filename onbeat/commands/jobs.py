"""Commands that talk to a gateway about jobs."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins
from rich.text import Text

from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import flag_settings, load_spec
from onbeat.commands import options
from onbeat.commands.options import Job
from onbeat.stack.access import run_dir_flag, run_root_from
from onbeat.terminal.follow import follow, until_over
from onbeat.terminal.job_view import NoView, dead_letter_table, health_lines
from onbeat.terminal.output import FAILED, console_for, emit, tell, tell_fetch
from onbeat.terminal.panel import view_for
from onbeat.terminal.trainer_log import LogLines
from onbeat.terminal.words import UNKNOWN, one_line, plural

DEFAULT_LINES = 100
MAX_LETTERS = 20
"""Batches that were given up which are shown at the end of a job, the newest first."""


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
    access = options.access_from(gateway, api_key, run_dir)
    job_spec = options.with_local_paths(job_spec, [spec.parent], access)
    with options.client_for(access) as client:
        if idempotency_key and not (idempotency_key.isascii() and idempotency_key.isprintable()):
            raise InvalidInput("must be visible ASCII characters", field="--idempotency-key", cure="use a UUID")
        key = idempotency_key or uuid.uuid4().hex
        status = client.submit(job_spec, idempotency_key=key, fetching=tell_fetch)
        _follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)


def watch(
    job: Job,
    show_log: Annotated[
        bool, typer.Option("--log", help="Show the log of the job's trainers: the last lines, and those that come.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--lines", "-n", min=0, max=100_000, help="With --log: begin with so many last lines. [100]"),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="With --log: end after the lines that are there; exit code 0.")
    ] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Follow a job to its end, and show the batches that were given up; exit code 1 unless the job succeeds.

    Ctrl-C leaves the job running.
    """
    for flag, is_set in (("--lines", lines is not None), ("--once", once)):
        if is_set and not show_log:
            raise InvalidInput("is a flag of --log", field=flag, cure="add --log, or leave it out")
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        if show_log:
            num_lines = DEFAULT_LINES if lines is None else lines
            _show_log(client, job, num_lines, once=once, json_output=json_output)
        if not once:
            _follow_to_end(client, job, json_output=json_output, is_quiet=show_log)


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


def _show_log(client: GatewayClient, job_id: str, num_lines: int, *, once: bool, json_output: bool) -> None:
    """Prints the last lines of the trainers' log and, unless once, those that come until the job has ended.

    With JSON each line is an object, since a line is known before the next one; with once all are one object.
    """
    log = LogLines(client, job_id)
    last = log.last(num_lines)
    if once:
        last = [*last, *log.unfinished()][-num_lines:] if num_lines else []
        if json_output:
            emit({"job_id": job_id, "lines": last})
        else:
            _print_lines(job_id, last, json_output=False)
            if not last and num_lines:
                console_for(json_output=True).print("the log is empty: no trainer has started yet")
        return
    _print_lines(job_id, last, json_output=json_output)
    for new, is_over in until_over(client, job_id, log.rest):
        _print_lines(job_id, [*new, *(log.unfinished() if is_over else [])], json_output=json_output)


def _print_lines(job_id: str, lines: list[str], *, json_output: bool) -> None:
    console = console_for(json_output=False)
    for line in lines:
        if json_output:
            emit({"job_id": job_id, "line": line})
        else:
            console.print(line, soft_wrap=True)


def _follow_to_end(client: GatewayClient, job_id: str, *, json_output: bool, is_quiet: bool = False) -> None:
    """Follows a job, and prints how it ended. is_quiet: of what comes before the end nothing is shown."""
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
        console.print(*health_lines(status), sep="\n", end="\n" * bool(status.health), soft_wrap=True)
        if letters:
            console.print(Text(f"\n{plural(status.batches_dead, 'batch')} given up; the newest:\n"))
        for letter in letters:
            console.print(dead_letter_table(letter))
    if status.state is not JobState.SUCCEEDED:
        raise typer.Exit(FAILED)
