"""`onbeat sweep`: a job for each combination of some values, and a table of how they ended."""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from contracts.errors import Conflict, OnbeatError, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading
from onbeat.base.process.waiting import Waiting
from onbeat.client.derived_specs import named_after, shown_values, swept, varied_keys
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient
from onbeat.client.spec_file import read_spec, read_toml
from onbeat.commands import options
from onbeat.commands.job_list import WHOLE
from onbeat.terminal.job_view import STATE_STYLES
from onbeat.terminal.output import FAILED, console_for, emit, tell_fetch
from onbeat.terminal.scores import with_error
from onbeat.terminal.words import UNKNOWN, duration, one_line, score

LOOK_EVERY_S = 1.0
COLUMNS = ("job", "state", "iterations", "held-out before", "after", "took")
"""Columns of the table behind those of the swept keys."""


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="Job spec, a TOML file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY.PATH=A,B,…", help="Values of one key of the spec; may be repeated: all combinations."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for all jobs, or return once they are queued.")
    ] = True,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Submit a job for each combination of some values, and compare them; exit code 1 unless all succeed.

    The stack trains as many of them at a time as it has consumers: `onbeat up --consumers 2`. All jobs have one tag, by
    which the page compares them.
    """
    tag = f"sweep-{uuid.uuid4().hex[:6]}"
    values = read_toml(spec)
    combinations = swept(settings or [])
    keys = varied_keys(combinations)
    readings = [_reading_of(values, changes, keys, tag) for changes in combinations]
    console = console_for(json_output=json_output)
    access = options.access_for(readings, gateway, api_key, run_dir)
    specs = [options.spec_for_gateway(reading, [spec.parent], access) for reading in readings]
    with options.client_for(access) as client:
        jobs = _submitted(client, specs)
        console.print(f"{len(jobs)} jobs, tagged {tag}")
        try:
            statuses = _ended(client, jobs) if wait else [client.job(job_id) for job_id in jobs]
        except KeyboardInterrupt:
            sys.stderr.write(f"the jobs tagged {tag} go on: onbeat jobs\n")
            raise
    if json_output:
        rows = zip(combinations, statuses, strict=True)
        emit({"tag": tag, "jobs": [{"values": shown_values(changes), "status": status} for changes, status in rows]})
    else:
        if not console.is_terminal:
            console.width = WHOLE
        console.print(sweep_table(combinations, statuses))
    if wait and any(status.state is not JobState.SUCCEEDED for status in statuses):
        raise typer.Exit(FAILED)


def sweep_table(combinations: Sequence[Sequence[str]], statuses: Sequence[JobStatus]) -> Table:
    """Returns a row for each job, with the values that it has of the swept keys."""
    values = [dict(change.split("=", 1) for change in changes) for changes in combinations]
    keys = varied_keys(combinations)
    best = max((status.evaluation_latest.sampled for status in statuses if status.evaluation_latest), default=None)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in (*(key.rpartition(".")[2] for key in keys), *COLUMNS):
        # An id that is cut names no job.
        least = max(len(status.job_id) for status in statuses) if name == "job" else None
        table.add_column(name, no_wrap=True, min_width=least)
    for of_job, status in zip(values, statuses, strict=True):
        before = status.evaluation_before
        latest = status.evaluation_latest
        is_best = latest is not None and latest.sampled == best
        table.add_row(
            *(one_line(of_job[key]) for key in keys),
            status.job_id,
            Text(status.state.value, STATE_STYLES[status.state]),
            f"{status.iterations_committed}/{status.iterations}",
            score(before.sampled if before else None),
            Text(with_error(latest) if latest else UNKNOWN, "bold green" if is_best else ""),
            duration(status.ended_s - status.started_s) if status.ended_s and status.started_s else UNKNOWN,
        )
    return table


def _reading_of(values: dict[str, Any], changes: Sequence[str], keys: Sequence[str], tag: str) -> SpecReading:
    """Reads the spec of one job of the sweep. keys: those by which the jobs differ."""
    of_job = copy.deepcopy(values)
    named_after(of_job, [change for change in changes if change.partition("=")[0] in keys], tag=tag)
    return read_spec(of_job, changes)


def _submitted(client: GatewayClient, specs: Sequence[JobSpec]) -> list[str]:
    """Submits all jobs, and returns their ids. Where one is refused, those before it are cancelled."""
    jobs: list[str] = []
    try:
        for spec in specs:
            status = client.submit(spec, idempotency_key=uuid.uuid4().hex, fetching=tell_fetch)
            jobs.append(status.job_id)
    except OnbeatError:
        for job_id in jobs:
            with contextlib.suppress(Conflict):
                client.cancel(job_id)
        raise
    return jobs


def _ended(client: GatewayClient, jobs: Sequence[str]) -> list[JobStatus]:
    """Waits until all jobs have ended, however long they take. Raises Unavailable where the gateway stays away."""
    ended: dict[str, JobStatus] = {}
    console = console_for(json_output=True)
    away: Waiting | None = None
    waiting = set(jobs)
    while waiting:
        try:
            statuses = [client.job(job_id) for job_id in jobs if job_id in waiting]
        except Unavailable:
            away = away or Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
            away.poke()
            statuses = []
        else:
            away = None
        for status in statuses:
            if status.state.is_final:
                ended[status.job_id] = status
                waiting.discard(status.job_id)
                reason = f": {one_line(status.reason)}" if status.reason else ""
                console.print(f"{status.job_id}  {one_line(status.name)}  {status.state.value}{reason}", soft_wrap=True)
        if waiting:
            time.sleep(LOOK_EVERY_S)
    return [ended[job_id] for job_id in jobs]
