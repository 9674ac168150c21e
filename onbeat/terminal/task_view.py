"""A task on the terminal: a bar for people, plain lines where output is a file or a pipe; and how it is followed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from contracts.errors import Conflict, OnbeatError, Unavailable
from contracts.tasks.kinds import TaskState
from contracts.tasks.records import TaskProgress, TaskStatus
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient
from onbeat.terminal.words import one_line, plural, size

LOOK_EVERY_S = 0.5
LINE_EVERY_S = 5.0
"""A line says how far it is no more often than this."""
BAR_COLUMNS = 30
TASK_STYLES = {
    TaskState.QUEUED: "yellow",
    TaskState.RUNNING: "cyan",
    TaskState.DONE: "bold green",
    TaskState.FAILED: "bold red",
    TaskState.CANCELLED: "yellow",
}


class ProgressView:
    """Shows how far one piece of work is. Use as a context manager."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._shown = ""
        self._last = TaskProgress()
        self._line_s = clock()

    def __enter__(self) -> ProgressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, what: str, progress: TaskProgress) -> None:
        """Draws the bar, or prints a line where there is news. what: the work and its state, as text of ours."""
        if self._live is not None:
            self._live.update(_bar(what, progress), refresh=True)
            return
        now_s = self._clock()
        has_moved = progress != self._last and now_s - self._line_s >= LINE_EVERY_S
        if what == self._shown and not has_moved:
            return
        self._shown, self._last, self._line_s = what, progress, now_s
        words = progress_in_words(progress)
        self._console.print(one_line(f"{what}  {words}".rstrip()), soft_wrap=True)

    def line(self, text: str) -> None:
        """Prints a line that stays."""
        self._console.print(one_line(text), soft_wrap=True)


def progress_in_words(progress: TaskProgress) -> str:
    """`3 of 12 files, 1.2 GB of 4.0 GB`; "" where nothing is known."""
    parts: list[str] = []
    if progress.files_total:
        parts.append(f"{progress.files_done} of {plural(progress.files_total, 'file')}")
    if progress.bytes_total:
        parts.append(f"{size(progress.bytes_done)} of {size(progress.bytes_total)}")
    return ", ".join(parts)


def _bar(what: str, progress: TaskProgress) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_column(no_wrap=True)
    row.add_column(width=BAR_COLUMNS)
    row.add_column(no_wrap=True)
    total = progress.bytes_total or progress.files_total
    done = progress.bytes_done or progress.files_done
    # Without a total the bar only says that something is done.
    bar = ProgressBar(total=total or None, completed=done, width=BAR_COLUMNS)
    row.add_row(Text(one_line(what)), bar, Text(progress_in_words(progress)))
    return row


def follow_task(client: GatewayClient, status: TaskStatus, view: ProgressView) -> TaskStatus:
    """Shows a task until it has ended, and returns it then. Ctrl-C cancels it, and says so.

    Raises:
        Unavailable: The gateway stays away. The task goes on.
    """
    away: Waiting | None = None
    try:
        while True:
            view.show(_in_words(status), status.progress)
            if status.state.is_final:
                return status
            time.sleep(LOOK_EVERY_S)
            try:
                status = client.task(status.task_id)
                away = None
            except Unavailable:
                away = away or Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
                away.poke()
    except KeyboardInterrupt:
        _cancel(client, status, view)
        raise


def _in_words(status: TaskStatus) -> str:
    """`verify task-0123456789ab queued: waits for …`."""
    reason = ""
    if status.reason and not status.state.is_final:
        reason = f": {status.reason}"
    return f"{status.kind.value} {status.task_id} {status.state.value}{reason}"


def _cancel(client: GatewayClient, status: TaskStatus, view: ProgressView) -> None:
    try:
        ended = client.cancel_task(status.task_id)
    except Conflict:
        view.line(f"{status.task_id} had ended before it could be cancelled")
    except OnbeatError as error:
        view.line(f"{status.task_id} goes on: it can't be cancelled: {error}")
    else:
        view.line(f"{status.task_id} is {'cancelled' if ended.state.is_final else 'asked to end'}")
