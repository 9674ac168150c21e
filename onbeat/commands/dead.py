"""`onbeat dead`: the batches that a job gave up, and another try."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from contracts.dead_letters import DeadLetter
from onbeat.commands import options
from onbeat.commands.jobs import Job
from onbeat.terminal.output import tell
from onbeat.terminal.words import one_line, plural


def dead(
    job: Job,
    retry: Annotated[
        str | None, typer.Option("--retry", metavar="ENTRY", help="Queue the job again, which samples it anew.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="Letters to show.")] = 20,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show a job's dead batches: why each was given up, its prompts, and whether it can be tried again."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        if retry is not None:
            status = client.retry_dead(job, retry)
            tell(status, Text(f"{job}  {status.state.value}"), json_output=json_output)
            return
        letters = client.dead(job, limit=limit)
    shown = Group(*(_letter(one) for one in letters)) if letters else Text(f"{job} has no dead batch")
    tell({"letters": letters}, shown, json_output=json_output)


def _letter(letter: DeadLetter) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.at_s))
    head = Text.assemble((one_line(letter.batch_id), "bold"), f"   {when}   {plural(letter.attempts, 'attempt')}")
    table.add_row(letter.entry_id, head)
    table.add_row("reason", Text(one_line(letter.reason)))
    for prompt in letter.prompts:
        table.add_row(Text(one_line(prompt.prompt_id)), Text(one_line(prompt.text)))
    again = "onbeat dead JOB --retry " + letter.entry_id if letter.can_retry else letter.why_not
    table.add_row("retry", Text(one_line(again)))
    table.add_row("", "")
    return table
