"""Who asked a service for work, as its log says it: by a name that each process gives, of which nothing depends."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from contracts.settings import OPERATOR, StackSettings
from onbeat.base.http import asker, change_log
from onbeat.base.http.access import CALLER, Access, AccessRules
from onbeat.base.http.asker import HEADER, MAX_COUNTED, OTHERS, WorkLog, asker_headers, asker_of
from onbeat.base.telemetry import logs
from reward_service.app import create_app
from tests.served import asked

KEY = {"Authorization": "Bearer k"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure(StackSettings(log_format="json"), service="test", stream=stream)
    yield stream
    root.handlers[:], root.level = before, level


def of_access(lines: io.StringIO) -> list[dict[str, Any]]:
    written = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in written if line["logger"] in (asker.__name__, change_log.__name__)]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the status that its path names, and shows whose key it was."""
    caller = scope[CALLER]
    answer = PlainTextResponse(f"{caller.name} {caller.scope}", status_code=int(scope["path"].rpartition("/")[2]))
    await answer(scope, receive, send)


def checked(*, works_for_processes: bool) -> Access:
    rules = AccessRules.of(
        StackSettings(), key="k", key_setting="ONBEAT_REWARD_KEY", works_for_processes=works_for_processes
    )
    return Access(app, rules)


@asynccontextmanager
async def client_of(access: Access, **headers: str) -> Any:
    transport = httpx.ASGITransport(access, client=("10.0.0.7", 4242))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY | headers) as http:
        yield http


async def end(access: Access) -> None:
    """The end of the service, as its server tells the app."""

    async def receive() -> Message:
        return {"type": "lifespan.shutdown"}

    async def ends(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.shutdown.complete"})

    async def send(message: Message) -> None:
        return None

    access._app = ends
    await access({"type": "lifespan"}, receive, send)


async def test_work_that_was_answered_is_one_line_with_the_processes_that_asked(lines: io.StringIO) -> None:
    access = checked(works_for_processes=True)
    for name, number in (("onbeat-producer-1", 3), ("onbeat-producer-2", 2)):
        async with client_of(access, **asker_headers(StackSettings(name=name))) as http:
            for _ in range(number):
                assert (await http.post("/v1/score/200")).status_code == 200
    assert of_access(lines) == [], "the line comes after a while, or at the end"
    await end(access)
    (line,) = of_access(lines)
    assert line["requests"] == {
        "onbeat-producer-1": {"POST /v1/score/200": 3},
        "onbeat-producer-2": {"POST /v1/score/200": 2},
    }
    assert "onbeat-producer-2: POST /v1/score/200 2 times" in line["message"]
    await end(access)
    assert len(of_access(lines)) == 1, "and is said once"


async def test_a_refused_request_has_a_line_of_its_own_with_who_asked(lines: io.StringIO) -> None:
    access = checked(works_for_processes=True)
    async with client_of(access, **{HEADER: "onbeat-producer-1"}) as http:
        await http.post("/v1/score/422")
    async with client_of(access) as http:
        await http.post("/v1/score/500")
    assert [(line["process"], line["status"]) for line in of_access(lines)] == [
        ("onbeat-producer-1", 422),
        ("a process at 10.0.0.7", 500),
    ]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "\x1b[2J", "the operator", "a,b"])
async def test_a_name_of_another_form_is_none_and_the_address_says_who_asked(name: str, lines: io.StringIO) -> None:
    async with client_of(checked(works_for_processes=True), **{HEADER: name}) as http:
        await http.post("/v1/score/422")
    (line,) = of_access(lines)
    assert line["process"] == "a process at 10.0.0.7"
    assert asker_of([name]) == ""
    assert asker_of(["one", "other"]) == ""


async def test_a_name_gives_no_right_and_where_people_ask_it_counts_for_nothing(lines: io.StringIO) -> None:
    for works in (True, False):
        access = checked(works_for_processes=works)
        async with client_of(access, **{HEADER: "admin"}) as http:
            assert (await http.post("/200")).text == f"{OPERATOR} admin"
            wrong = await http.post("/200", headers={"Authorization": "Bearer other"})
            assert wrong.status_code == 401
    of_process, of_operator, of_no_key = of_access(lines)
    assert (of_process["process"], of_process["status"]) == ("admin", 401)
    assert (of_operator["key"], of_operator["path"]) == (OPERATOR, "/200"), "a gateway's line says whose key it was"
    assert (of_no_key["key"], of_no_key["status"]) == ("", 401)


async def test_a_line_comes_by_itself_and_names_are_bounded(lines: io.StringIO) -> None:
    work = WorkLog(summary_s=0.01)
    for number in range(MAX_COUNTED + 5):
        work.count(f"p{number}", "POST /v1/score")
    async with asyncio.timeout(60):
        while not of_access(lines):
            await asyncio.sleep(0.01)
    (line,) = of_access(lines)
    assert len(line["requests"]) == MAX_COUNTED + 1
    assert line["requests"][OTHERS] == {OTHERS: 5}


def test_a_host_whose_name_no_header_can_carry_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Jürgens Büro")
    assert asker_headers(StackSettings()) == {}
    assert asker_headers(StackSettings(name="generator-1")) == {HEADER: "generator-1"}


def test_the_reward_service_logs_no_line_for_a_score_and_no_operator(
    settings: StackSettings, lines: io.StringIO
) -> None:
    service: FastAPI = create_app(settings, num_threads=1)
    try:
        headers = {"Authorization": f"Bearer {settings.reward_key}"} | asker_headers(replace(settings, name="g-1"))
        body = b'{"components":[{"type":"exact"}],"items":[{"prompt":"p","completion":"c","reference":"c"}]}'
        answers = [
            asked(service, "POST", "/v1/score", headers=headers | {"Content-Type": "application/json"}, content=content)
            for content in (body, body, b"{}")
        ]
    finally:
        service.state.scorers.close()
        service.state.environments.shut()
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    (line,) = of_access(lines)
    assert (line["process"], line["status"]) == ("g-1", 422)
    assert OPERATOR not in lines.getvalue()
