"""What commands print: text from outside stays text, an empty value is a dash, and a stop is no warning."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import httpx
import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput, Refusal, SpecRefused
from contracts.events import BatchDead, GeneratorsChanged, HealthChanged, StateChanged
from contracts.jobs import HealthProblem, JobState, JobStatus
from onbeat.client.gateway import GatewayClient
from onbeat.client.progress import JobProgress
from onbeat.terminal.follow import EventReader
from onbeat.terminal.job_view import PlainView
from onbeat.terminal.output import TextConsole, emit, emit_error, tell_page
from onbeat.terminal.panel import view_for
from tests.until import until

HOSTILE = "[bold]a[/bold][/]\x1b[2Jb\x9b31m\nc :boom:\u202e"
"""Markup that is open and closed wrongly, what clears a screen, a line of its own, an emoji's name, a turned line."""
AS_TEXT = r"[bold]a[/bold][/]\x1b[2Jb\x9b31m\nc :boom:\u202e"
STATUS = JobStatus(
    job_id="job-1",
    name=HOSTILE,
    reason=HOSTILE,
    state=JobState.FAILED,
    schedule="periodic",
    iterations=3,
    created_s=1.0,
    health=(HealthProblem(rule="entropy_gone", since=7, problem=HOSTILE, cure=HOSTILE),),
)


def terminal() -> tuple[TextConsole, io.StringIO]:
    """A console with colours, as wide as any line."""
    shown = io.StringIO()
    return TextConsole(file=shown, force_terminal=True, width=1000), shown


def show_events(console: TextConsole) -> None:
    view, progress = PlainView(console), JobProgress(STATUS)
    view.event(BatchDead(at_s=0.0, batch_id="3/train/0", reason=HOSTILE), progress)
    view.event(HealthChanged(at_s=0.0, iteration=7, problems=STATUS.health), progress)
    view.event(GeneratorsChanged(at_s=0.0, came=(HOSTILE,), gone=(HOSTILE,), num_live=1), progress)
    view.event(StateChanged(at_s=0.0, state=JobState.FAILED, reason=HOSTILE), progress)
    view.event(StateChanged(at_s=0.0, state=JobState.QUEUED, by=HOSTILE, changes=(HOSTILE,)), progress)


def show_live(console: TextConsole) -> None:
    with view_for(console) as view:
        view.refresh(JobProgress(STATUS))


VIEWS = {
    "live panel": show_live,
    "lines": show_events,
    "any text": lambda console: console.print(HOSTILE.replace("\n", r"\n")),
}


def assert_is_text(shown: str) -> None:
    """Asserts that what HOSTILE says stands there, and what it does was not done."""
    assert AS_TEXT in shown
    for control in ("\x1b[2J", "\x9b", "\u202e", "\N{COLLISION SYMBOL}"):
        assert control not in shown


@pytest.mark.parametrize("view", VIEWS)
def test_what_others_wrote_is_text_in_every_view(view: str) -> None:
    console, shown = terminal()
    VIEWS[view](console)
    assert_is_text(shown.getvalue())


@pytest.mark.parametrize(
    ("state", "reason", "lasts_s"),
    [(JobState.RUNNING, "waits", 1.5), (JobState.QUEUED, "waits", 4.0), (JobState.QUEUED, "waits: start one", 1.5)],
)
def test_a_wait_is_said_once_when_it_has_lasted(state: JobState, reason: str, lasts_s: float) -> None:
    console, shown = terminal()
    now_s = 0.0
    view, progress = PlainView(console, clock=lambda: now_s), JobProgress(replace(STATUS, state=state, reason=reason))
    for now_s in (0.0, lasts_s - 0.1, lasts_s, lasts_s + 9.0):
        assert bool(shown.getvalue()) == (now_s > lasts_s)
        view.refresh(progress)
    assert shown.getvalue() == f"job {state.value}: {reason}\n"


def test_an_error_is_one_line_of_text(capsys: pytest.CaptureFixture[str]) -> None:
    emit_error(InvalidInput(HOSTILE), json_output=False)
    assert capsys.readouterr().err == f"onbeat: {AS_TEXT}\n"


def test_a_spec_that_is_refused_has_a_line_for_each_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    refusals = (
        Refusal(field="name", problem=HOSTILE, cure="write another"),
        Refusal(field="trainer.kl_alarm", problem="has no effect"),
    )
    emit_error(SpecRefused(refusals), json_output=False)
    assert capsys.readouterr().err.splitlines() == [
        f"onbeat: name: {AS_TEXT} (write another)",
        "onbeat: trainer.kl_alarm: has no effect",
    ]
    emit_error(SpecRefused(refusals), json_output=True)
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["type"], error["field"], error["cure"]) == ("SpecRefused", "name", "write another")
    assert error["refusals"] == [
        {"field": "name", "problem": HOSTILE, "cure": "write another"},
        {"field": "trainer.kl_alarm", "problem": "has no effect", "cure": ""},
    ]


def test_an_object_has_no_controls_and_means_what_it_meant(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"name": HOSTILE})
    (line,) = capsys.readouterr().out.split("\n")[:-1]
    assert line.isprintable()
    assert json.loads(line) == {"name": HOSTILE}


class Held(httpx.SyncByteStream):
    """One event, and then nothing until the connection is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        event = encode_json(StateChanged(at_s=0.0, state=JobState.RUNNING)).decode()
        yield f"id: 1-0\ndata: {event}\n\n".encode()
        self.closed.wait()
        raise httpx.ReadError("closed")


def test_who_stops_following_is_not_told_that_the_stream_broke_off(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream = Held()
    headers = {"Content-Type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=stream))
    with GatewayClient("http://127.0.0.1:1", "", transport=transport) as client:
        reader = EventReader(client, "job-1")
        until(lambda: bool(reader.take(0.1)), "the event")
    stream.closed.set()
    until(lambda: reader.ended, "the reader's end")
    assert reader.take(0.0) == []
    assert "event stream" not in caplog.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_address_of_the_page_has_the_key_at_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    key = "k" * 60 + "/+"
    for file, address in (
        (Terminal(), f"http://127.0.0.1:8000/#/jobs/job-1?key={'k' * 60}%2F%2B"),
        (io.StringIO(), "http://127.0.0.1:8000/#/jobs/job-1"),
    ):
        console = TextConsole(file=file, width=80, no_color=True, force_terminal=False)
        tell_page(console, "http://127.0.0.1:8000", key, job_id="job-1")
        assert file.getvalue() == f"page  {address}\n"
