"""A job's progress beside a program's own output: one line of a terminal, or one output of a notebook's cell.

The line is there while the program waits, and gone when it goes on, so that what the program prints stands by itself.
"""

from __future__ import annotations

import html
import sys
from importlib import import_module
from typing import Any, Protocol

from rich.live import Live
from rich.table import Table
from rich.text import Text

from onbeat.client.progress import JobProgress
from onbeat.terminal.job_view import FRAMES_PER_S, bar, curve_text, left_in_words
from onbeat.terminal.output import TextConsole
from onbeat.terminal.words import UNKNOWN, one_line, score, sparkline

STARTING = "starting redis and every other process"


class Shown(Protocol):
    """The display of a program that waits."""

    def began(self, words: str) -> None:
        """Says once which job runs, where, and on what."""

    def update(self, progress: JobProgress | None) -> None:
        """Shows the progress; None before the job is there."""

    def pause(self) -> None:
        """The program goes on."""


def shown_for(wanted: bool | None) -> Shown:
    """wanted: None shows it where a person sees it, at a terminal or in a notebook."""
    if wanted is False:
        return HIDDEN
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and hasattr(shell, "kernel"):
        return NotebookOutput(import_module("IPython.display"))
    if wanted or sys.stderr.isatty():
        return TerminalLine()
    return StartLine()


class Hidden:
    """Shows nothing."""

    def began(self, words: str) -> None: ...

    def update(self, progress: JobProgress | None) -> None: ...

    def pause(self) -> None: ...


HIDDEN = Hidden()


class StartLine:
    """Writes a line to stderr where no terminal is: the job, its folder and its page."""

    def began(self, words: str) -> None:
        sys.stderr.write(f"{one_line(words)}\n")

    def update(self, progress: JobProgress | None) -> None: ...

    def pause(self) -> None: ...


class TerminalLine:
    """The last line of stderr."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def began(self, words: str) -> None:
        TextConsole(stderr=True).print(Text(one_line(words), "dim"), soft_wrap=True)

    def update(self, progress: JobProgress | None) -> None:
        line = Text(STARTING, "dim") if progress is None else _line(progress)
        if self._live is None:
            console = TextConsole(stderr=True)
            self._live = Live(line, console=console, refresh_per_second=FRAMES_PER_S, transient=True)
            self._live.start()
        self._live.update(line, refresh=True)

    def pause(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class NotebookOutput:
    """The output of the cell that waits first; it is updated in place."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def began(self, words: str) -> None:
        self._display.display(self._display.HTML(f"<small>{_text(words)}</small>"))

    def update(self, progress: JobProgress | None) -> None:
        shown = self._display.HTML(f"<i>{STARTING}</i>" if progress is None else as_html(progress))
        if self._handle is None:
            self._handle = self._display.display(shown, display_id=True)
        else:
            self._handle.update(shown)

    def pause(self) -> None: ...


def as_html(progress: JobProgress) -> str:
    """A job in a few lines; what others wrote in it is text."""
    status = progress.status
    iterations = progress.in_order
    head = f"<b>{_text(status.name)}</b> {status.job_id} {status.state.value} {_text(status.reason)}"
    bar_of = f'<progress value="{progress.num_committed}" max="{status.iterations}"></progress>'
    facts = [f"{progress.num_committed} of {status.iterations} iterations"]
    left = left_in_words(progress)
    if left:
        facts.append(left)
    if iterations:
        first, last = (curve_text(progress, metrics) for metrics in (iterations[0], iterations[-1]))
        facts.append(f"{progress.curve_name} {first} <code>{sparkline(progress.curve)}</code> {last}")
    before = progress.evaluation_before
    after = progress.evaluation_latest
    if before is not None and after is not None:
        facts.append(f"held-out {score(before.sampled)} → {score(after.sampled)}")
    return f"<div>{head}<br>{bar_of} {', '.join(facts)}</div>"


def _line(progress: JobProgress) -> Table:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True)
    row.add_column(ratio=1)
    latest = progress.latest
    curve = UNKNOWN if latest is None else curve_text(progress, latest)
    head = f"{one_line(progress.status.name)}  {progress.status.state.value}  {progress.curve_name} {curve}"
    row.add_row(Text(head), bar(progress))
    return row


def _text(words: str) -> str:
    return html.escape(one_line(words))
