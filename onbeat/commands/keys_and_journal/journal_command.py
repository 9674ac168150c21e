"""`onbeat journal`: who changed which job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from onbeat.commands import options
from onbeat.commands.keys_and_journal.journal_lines import JournalLines, ask_for_lines
from onbeat.terminal.output import tell
from onbeat.terminal.words import one_line


def journal(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Only its changes.")] = "",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")] = 100,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show who submitted, cancelled, resumed, retried, deleted, verified and exported jobs, newest first."""
    with options.client_for(options.access_from(gateway, api_key, run_dir)) as client:
        found = ask_for_lines(client, job, limit=limit)
    tell(found, Text("\n".join(lines_of(found)) or "no job was changed"), json_output=json_output)


def lines_of(found: JournalLines) -> list[str]:
    """A line each, oldest last."""
    return [
        f"{datetime.fromtimestamp(line.at_s, UTC):%Y-%m-%dT%H:%M:%SZ}  {line.action:11}  {line.job_id:20}  "
        f"{one_line(line.who)} from {one_line(line.address)}"
        for line in found.lines
    ]
