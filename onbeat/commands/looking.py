"""Commands that look into a job, once or again and again: its streams, its log, its dead batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Annotated, TypeVar

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from contracts.answers import LogPart
from contracts.encoding.wire import convert
from contracts.errors import Unavailable
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient
from onbeat.commands import options
from onbeat.commands.job_list import WHOLE
from onbeat.commands.letters import DeadLetter, ask_for_letters
from onbeat.commands.letters import retry as retry_letter
from onbeat.commands.options import Job
from onbeat.terminal.output import console_for, emit, tell
from onbeat.terminal.stream_tables import MAX_COLUMNS, live_report, report_line, report_tables
from onbeat.terminal.words import one_line, plural

T = TypeVar("T")

EVERY_S = 1.0
LOG_BYTES = 256 * 1024
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended, or Ctrl-C.")]
Lines = Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="Show so many of the last lines.")]
END = 2**53
"""Beyond every file: the gateway answers with its size."""
LONGEST_LINE = 64 * 1024
"""A line that does not end is shown in parts."""


def streams(
    job: Job,
    follow: Follow = False,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show a job's batches and streams in Redis: lengths, ages, leases, rejections, bytes, and the names of their keys.

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
            for report, _ in _until_over(client, job, lambda: client.streams(job)):
                if json_output:
                    emit(report)
                else:
                    console.print(report_line(report), soft_wrap=True)
            return
        with Live(Group(*live_report(report)), console=console, auto_refresh=False) as live:
            for report, _ in _until_over(client, job, lambda: client.streams(job)):
                live.update(Group(*live_report(report)), refresh=True)


def _until_over(client: GatewayClient, job: str, read: Callable[[], T]) -> Iterator[tuple[T, bool]]:
    """What `read` brings, once a second, and whether the job has ended, after which there is no more.

    Raises Unavailable when the gateway stays away.
    """
    away: Waiting | None = None
    while True:
        try:
            is_over = client.job(job).state.is_final
            brought = read()
        except Unavailable:
            away = away or Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
            away.poke()
        else:
            away = None
            yield brought, is_over
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
        for some, is_over in _until_over(client, job, log.rest):
            rest = log.unfinished() if is_over else []
            _show(job, [*some, *rest], json_output=json_output, console=console)


def _show(job: str, lines: list[str], *, json_output: bool, console: Console) -> None:
    """With --follow there is an object for each line: it is known one by one."""
    for line in lines:
        if json_output:
            emit({"job_id": job, "line": line})
        else:
            console.print(line, soft_wrap=True)


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
            status = retry_letter(client, job, retry)
            tell(status, Text(f"{job}  {status.state.value}"), json_output=json_output)
            return
        letters = ask_for_letters(client, job, limit=limit)
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


class LogLines:
    """Follows one log; `rest` is called again and again."""

    def __init__(self, client: GatewayClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._at = 0
        self._part = ""

    def last(self, num_lines: int) -> list[str]:
        """The last whole lines, and what is behind them where a line has not ended; then `rest` goes on there."""
        size = self._ask(END).size
        num_bytes = LOG_BYTES // 4
        while True:
            start = max(0, size - num_bytes)
            text = self._read(start)
            lines = text.split("\n")
            if start == 0 or len(lines) > num_lines + 1:
                break
            num_bytes *= 4
        *whole, self._part = lines
        return whole[-num_lines:] if num_lines else []

    def rest(self) -> list[str]:
        """The whole lines that came since."""
        at = self._at
        text = self._read(at)
        if self._at < at:  # another file, as of a job that was made again under a restored server
            self._part = ""
        *whole, self._part = (self._part + text).split("\n")
        if len(self._part) > LONGEST_LINE:
            whole, self._part = [*whole, self._part], ""
        return whole

    def unfinished(self) -> list[str]:
        """What is left of a line that was never ended."""
        part, self._part = self._part, ""
        return [part] if part else []

    def _read(self, after: int) -> str:
        return "".join(self._parts(after))

    def _ask(self, after: int) -> LogPart:
        """A part of the trainer's log; text as processes wrote it."""
        params = {"after": after, "limit": LOG_BYTES}
        return convert(self._client.of_job("GET", self._job_id, "/log", params=params), LogPart)

    def _parts(self, after: int) -> Iterator[str]:
        while True:
            part = self._ask(after)
            yield part.text
            self._at = part.next
            if part.next >= part.size or part.next == part.after:
                return
            after = part.next
