"""Commands that talk to a gateway about jobs."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.events import CheckpointWritten, JobEvent
from contracts.jobs import JobStatus
from contracts.spec.paths import paths_of
from contracts.spec.reading import spec_of_values
from onbeat.client.derived_specs import forking, renamed, without_digests
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import flag_settings, read_spec, read_toml
from onbeat.commands import options
from onbeat.commands.following import follow_or_show, follow_to_end
from onbeat.commands.options import Job
from onbeat.stack.access import GatewayAccess
from onbeat.terminal.follow import until_over
from onbeat.terminal.output import console_for, emit, tell, tell_fetch
from onbeat.terminal.trainer_log import LogLines

DEFAULT_LINES = 100


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
    reading = read_spec(read_toml(spec), [*flags, *(settings or [])])
    access = options.access_for([reading], gateway, api_key, run_dir)
    job_spec = options.spec_for_gateway(reading, [spec.parent], access)
    with options.client_for(access) as client:
        if idempotency_key and not (idempotency_key.isascii() and idempotency_key.isprintable()):
            raise InvalidInput("must be visible ASCII characters", field="--idempotency-key", cure="use a UUID")
        key = idempotency_key or uuid.uuid4().hex
        status = client.submit(job_spec, idempotency_key=key, fetching=tell_fetch)
        follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)


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
            follow_to_end(client, job, json_output=json_output, is_quiet=show_log)


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
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY.PATH=VALUE",
            help="Change one key of the spec; may be repeated. The job stays as it is, and a new one, a fork, goes on "
            "from its newest checkpoint.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end.")] = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Queue a failed or cancelled job again, or give a job more iterations: it goes on from its newest checkpoint."""
    if settings:
        for flag, value in (
            ("--on-unscorable", on_unscorable),
            ("--on-failure", on_failure),
            ("--wider-sums", wider_sums),
        ):
            if value:
                raise InvalidInput("has no effect with --set", field=flag, cure="set the key of the spec by --set, too")
        access = options.access_from(gateway, api_key, run_dir)
        with options.client_for(access) as client:
            status, version = _forked(client, access, job, settings, iterations)
            console_for(json_output=True).print(
                f"{status.job_id} goes on from version {version} of {job}", soft_wrap=True
            )
            follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)
        return
    of_components = options.stated_scores_from(on_unscorable or [], "--on-unscorable", e_g="math_verify=0")
    of_others = options.stated_scores_from(on_failure or [], "--on-failure", e_g="environment=0")
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        status = client.resume(
            job,
            iterations=iterations,
            on_unscorable=of_components,
            on_failure=of_others,
            wider_sums=wider_sums,
            fetching=tell_fetch,
        )
        follow_or_show(client, status, run_dir, wait=wait, json_output=json_output)


def _forked(
    client: GatewayClient, access: GatewayAccess, job_id: str, settings: list[str], iterations: int | None
) -> tuple[JobStatus, int]:
    """Submits a job that goes on from the newest checkpoint of another one, which has ended, with some keys changed.

    Args:
        client: Of the gateway.
        access: The same gateway's. Paths that are set start at the current folder, those of the other job stay.
        job_id: The other job.
        settings: KEY.PATH=VALUE of each key.
        iterations: How many both jobs train together; None takes the number of the other's spec.

    Returns:
        The new job's status, and the version that it begins with.

    Raises:
        Conflict: The other job has not ended.
        NotFound: It has written no checkpoint.
        InvalidInput: Nothing is left to train, or a path that is set is nowhere; and what the gateway refuses.
    """
    status = client.job(job_id)
    if not status.state.is_final:
        raise Conflict(
            f"a {status.state.value} job can't be gone on from", field="state", cure=f"onbeat cancel {job_id}, or wait"
        )
    version = newest_checkpoint(event for _, event in client.events(job_id))
    if not version:
        raise NotFound("has no checkpoint to go on from", field=job_id, cure="submit its spec anew")
    whole = status.iterations if iterations is None else iterations
    values = client.of_job("GET", job_id, "/spec", params={"defaults": "false"})
    if whole <= version and not any(setting.partition("=")[0].strip() == "iterations" for setting in settings):
        raise InvalidInput(
            f"{version} of {whole} are trained already",
            field="iterations",
            cure=f"give more in all, as --iterations {version + max(1, version)}",
        )
    without_digests(values, settings)
    theirs = paths_of(spec_of_values(values))
    renamed(values, settings)
    values = forking(values, job=job_id, version=version, iterations=max(1, whole - version))
    spec = options.spec_for_gateway(read_spec(values, settings), [], access, left=theirs)
    return client.submit(spec, idempotency_key=uuid.uuid4().hex, fetching=tell_fetch), version


def newest_checkpoint(events: Iterable[JobEvent]) -> int:
    """Returns the version of the checkpoint that a job wrote last; 0 where it wrote none."""
    version = 0
    for event in events:
        if isinstance(event, CheckpointWritten):
            # Iteration t makes version t + 1.
            version = event.iteration + 1
    return version


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
