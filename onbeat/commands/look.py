"""Commands that look into a job, once or again and again: its streams, its log."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live

from contracts.errors import Unavailable
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient
from onbeat.commands import options
from onbeat.commands.completion import Job
from onbeat.process.waiting import Waiting
from onbeat.terminal.log_lines import LogLines
from onbeat.terminal.output import console_for, emit, tell
from onbeat.terminal.stream_report import live_report, report_line, report_tables

EVERY_S = 1.0
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended, or Ctrl-C.")]
Lines = Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="Show so many of the last lines.")]


def streams(
    job: Job,
    follow: Follow = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show a job's Redis streams: length, pending, age, leases, rejections, bytes. With --follow once a second."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        report = client.streams(job)
        if not follow:
            tell(report, Group(*report_tables(report)), json_output=json_output)
            return
        console = console_for(json_output=False)
        if json_output or not console.is_terminal:
            for report in _reports(client, job):
                if json_output:
                    emit(report)
                else:
                    console.print(report_line(report), soft_wrap=True)
            return
        with Live(Group(*live_report(report)), console=console, auto_refresh=False) as live:
            for report in _reports(client, job):
                live.update(Group(*live_report(report)), refresh=True)


def _reports(client: GatewayClient, job: str) -> Any:
    """One a second, the last when the job has ended. Raises Unavailable when the gateway stays away."""
    away = Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
    while True:
        try:
            is_over = client.job(job).state.is_final
            report = client.streams(job)
        except Unavailable:
            away.poke()
        else:
            away.progress()
            yield report
            if is_over:
                return
        time.sleep(EVERY_S)


def logs(
    job: Job,
    follow: Follow = False,
    lines: Lines = 100,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show the log of a job's trainers: the last lines, and with --follow those that come."""
    console = console_for(json_output=False)
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        log = LogLines(client, job)
        found = log.last(lines)
        if not follow:
            found = [*found, *log.unfinished()][-lines:] if lines else []
            if json_output:
                emit({"job_id": job, "lines": found})
                return
        _show(job, found, json_output=json_output, console=console)
        if not follow:
            if not found and lines:
                console_for(json_output=True).print("the log is empty: no trainer has started yet")
            return
        for some in _coming(client, job, log):
            _show(job, some, json_output=json_output, console=console)


def _coming(client: GatewayClient, job: str, log: LogLines) -> Any:
    away = Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
    while True:
        try:
            is_over = client.job(job).state.is_final
            yield log.rest()
        except Unavailable:
            away.poke()
        else:
            away.progress()
            if is_over:
                yield log.unfinished()
                return
        time.sleep(EVERY_S)


def _show(job: str, lines: list[str], *, json_output: bool, console: Console) -> None:
    """With --follow there is an object for each line: it is known one by one."""
    for line in lines:
        if json_output:
            emit({"job_id": job, "line": line})
        else:
            console.print(line, soft_wrap=True)
