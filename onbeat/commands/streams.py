"""`onbeat streams`: the streams of a job in Redis, once or again and again."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from onbeat.commands import options
from onbeat.commands.job_list import WHOLE
from onbeat.commands.options import Job
from onbeat.terminal.follow import until_over
from onbeat.terminal.output import console_for, emit
from onbeat.terminal.stream_tables import MAX_COLUMNS, live_report, report_line, report_tables

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended, or Ctrl-C.")]


def streams(
    job: Job,
    follow: Follow = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show a job's batches and streams in Redis: lengths, ages, leases, rejections, bytes, and names of their keys.

    With --follow once a second.
    """
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        report = client.streams(job)
        console = console_for(json_output=False)
        if not follow:
            if json_output:
                emit(report)
                return
            if not console.is_terminal:
                console.width = WHOLE
            console.print(*report_tables(report, max_columns=None if console.is_terminal else MAX_COLUMNS))
            return
        if json_output or not console.is_terminal:
            for report, _ in until_over(client, job, lambda: client.streams(job)):
                if json_output:
                    emit(report)
                else:
                    console.print(report_line(report), soft_wrap=True)
            return
        with Live(Group(*live_report(report)), console=console, auto_refresh=False) as live:
            for report, _ in until_over(client, job, lambda: client.streams(job)):
                live.update(Group(*live_report(report)), refresh=True)
