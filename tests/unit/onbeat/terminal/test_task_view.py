"""How a task is shown: a bar at a terminal, and lines that say what is new elsewhere."""

from __future__ import annotations

import io

import pytest

from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskProgress, TaskStatus
from onbeat.client.gateway import GatewayClient
from onbeat.terminal import task_view
from onbeat.terminal.output import TextConsole
from onbeat.terminal.task_view import LINE_EVERY_S, ProgressView, follow_task, progress_in_words
from tests.until import Clock

HALF = TaskProgress(files_done=1, files_total=2, bytes_done=512, bytes_total=1024)


def test_progress_says_what_is_known_of_it() -> None:
    assert progress_in_words(TaskProgress()) == ""
    assert progress_in_words(TaskProgress(files_done=1, files_total=1)) == "1 of 1 file"
    assert progress_in_words(HALF) == "1 of 2 files, 512 B of 1.0 KB"


def test_a_pipe_gets_a_line_for_news_and_else_one_every_few_seconds() -> None:
    clock, output = Clock(), io.StringIO()
    with ProgressView(TextConsole(file=output, width=200), clock=clock) as view:
        view.show("verify task-1 queued", TaskProgress())
        view.show("verify task-1 queued", TaskProgress())
        view.show("verify task-1 running\x1b[2J", TaskProgress())
        view.show("verify task-1 running\x1b[2J", HALF)
        clock.now_s += LINE_EVERY_S
        view.show("verify task-1 running\x1b[2J", HALF)
        clock.now_s += LINE_EVERY_S
        view.show("verify task-1 running\x1b[2J", HALF)
    lines = output.getvalue().splitlines()
    assert "\x1b" not in output.getvalue()
    assert lines[0] == "verify task-1 queued"
    assert lines[1].startswith("verify task-1 running")
    assert lines[2].endswith("1 of 2 files, 512 B of 1.0 KB")
    assert len(lines) == 3


def test_a_terminal_gets_a_bar_that_goes_with_the_work() -> None:
    output = io.StringIO()
    console = TextConsole(file=output, width=120, force_terminal=True, color_system=None)
    with ProgressView(console) as view:
        view.show("verify task-1 running", HALF)
        view.line("a line that stays")
    shown = output.getvalue()
    assert "━" in shown
    assert "512 B of 1.0 KB" in shown
    assert "a line that stays" in shown


class Answers(GatewayClient):
    """A gateway that is away once, and then has done the task."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.asked = 0

    def task(self, task_id: str) -> TaskStatus:
        self.asked += 1
        if self.asked == 1:
            return super().task(task_id)  # no gateway listens there
        return status_of(TaskState.DONE)


def status_of(state: TaskState) -> TaskStatus:
    return TaskStatus(
        task_id="task-0123456789ab", kind=TaskKind.EXPORT, queue="files", state=state, who="ann", created_s=1.0
    )


def test_a_gateway_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_view, "LOOK_EVERY_S", 0.0)
    output = io.StringIO()
    with Answers() as client, ProgressView(TextConsole(file=output, width=200)) as view:
        assert follow_task(client, status_of(TaskState.RUNNING), view).state is TaskState.DONE
    assert output.getvalue().splitlines() == ["export task-0123456789ab running", "export task-0123456789ab done"]
