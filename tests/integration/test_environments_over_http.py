"""Environments over HTTP: the service is killed in the midst of a step and started again, as its client sees it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgpack
import pytest

from contracts.encoding.wire import encode, encode_json
from contracts.environments.service import Step, Task
from contracts.errors import EnvironmentUnavailable, InvalidInput
from contracts.spec.environment import EnvironmentSpec
from onbeat.base.process.child_process import descendants, living
from onbeat.environments.client import EnvironmentClient
from onbeat.stack.ports import free_port
from tests.played import KEY, PLUGIN, new, played, reason_of, reply_of, request, said, text_of
from tests.until import until

ECHO = EnvironmentSpec(name="echo")
BEARER = {"Authorization": f"Bearer {KEY}"}


class Service:
    """A process of its own, that can be killed and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, crash_at: str = "") -> None:
        path = os.pathsep.join([str(PLUGIN), os.getcwd(), os.environ.get("PYTHONPATH", "")])
        told = {
            "ONBEAT_REWARD_KEY": KEY,
            "ONBEAT_PORT": str(self.port),
            "ONBEAT_ENVIRONMENT_CHILDREN": "1",
            "ONBEAT_CRASH_AT": crash_at,
        }
        self.process = process = subprocess.Popen(
            [sys.executable, "-m", "reward_service"], env={**os.environ, **told, "PYTHONPATH": path}
        )
        until(lambda: self._is_ready() or process.poll() is not None, "the reward service")
        assert process.poll() is None

    def end(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(120.0)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5.0).status_code == 200
        except httpx.RequestError:
            return False


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    one = Service()
    one.start()
    yield one
    one.end()


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, headers=BEARER, timeout=60.0) as client:
        yield client


@asynccontextmanager
async def client_of(service: Service, **options: Any) -> AsyncIterator[EnvironmentClient]:
    async with httpx.AsyncClient(base_url=service.url) as http:
        yield EnvironmentClient(http=http, key=KEY, request_timeout_s=60.0, **options)


def post(http: httpx.Client, path: str, body: object, kind: str = "application/json") -> httpx.Response:
    content = encode_json(body) if kind == "application/json" else encode(body)
    return http.post(path, content=content, headers={"Content-Type": kind})


def test_a_trajectory_in_json_and_in_messagepack(http: httpx.Client) -> None:
    for kind in ("application/json", "application/msgpack"):
        opened = post(http, "/v1/sessions", request("echo", new(4)), kind)
        assert opened.status_code == 200, opened.text
        assert opened.headers["content-type"] == kind
        step = {"steps": [{"session_id": "s4", "turn": 0, "message": {"role": "assistant", "content": "4"}}]}
        answer = post(http, "/v1/steps", step, kind)
        found = answer.json() if kind == "application/json" else msgpack.unpackb(answer.content)
        message = {"role": "user", "content": "4"}
        reply = {"messages": [message], "reward": 1.0, "metrics": {"right": 1.0}}
        assert found == {"results": [{"type": "turned", "reply": reply}]}
        closed = post(http, "/v1/sessions/close", {"session_ids": ["s4", "s5"]}, kind)
        read = closed.json() if kind == "application/json" else msgpack.unpackb(closed.content)
        assert read == {"num_closed": 1}


@pytest.mark.parametrize(
    ("path", "body", "kind", "status", "field"),
    [
        ("/v1/steps", b"{}", "text/plain", 415, "Content-Type"),
        ("/v1/steps", b"{", "application/json", 400, None),
        ("/v1/steps", b'{"steps": []}', "application/json", 422, "steps"),
        ("/v1/sessions", b'{"steps": []}', "application/json", 422, None),
        ("/v1/environments/check", b'{"name": "no such"}', "application/json", 422, "environment.name"),
        (
            "/v1/environments/check",
            b'{"name": "strict", "params": {"level": 1}}',
            "application/json",
            422,
            "environment.params",
        ),
        ("/v1/environments/check", b'{"name": "dies_at_import"}', "application/json", 503, None),
    ],
)
def test_a_bad_request_names_what_is_wrong_with_it(
    http: httpx.Client, path: str, body: bytes, kind: str, status: int, field: str | None
) -> None:
    answer = http.post(path, content=body, headers={"Content-Type": kind})
    assert answer.status_code == status, answer.text
    assert answer.json()["field"] == field


def test_every_path_needs_the_key_and_the_process_says_how_it_is(service: Service, http: httpx.Client) -> None:
    assert httpx.post(f"{service.url}/v1/steps", content=b"").status_code == 401
    assert http.get("/healthz").json() == {"status": "ok"}
    assert {"echo", "nasty", "dies_at_import"} <= set(http.get("/v1/environments").json()["environments"])
    post(http, "/v1/sessions", request("echo", new(1, name="counted")))
    lines = http.get("/metrics").text.splitlines()
    assert 'onbeat_environment_results_total{outcome="turned"}' in "\n".join(lines)
    assert any(line.startswith("onbeat_environment_sessions ") and float(line.split()[1]) >= 1 for line in lines)


async def test_the_client_says_what_an_environment_is_and_what_is_wrong_with_a_request(service: Service) -> None:
    async with client_of(service) as client:
        facts = await client.facts(ECHO)
        assert (facts.deterministic, facts.version) == (True, "environment-plugin 1.0")
        with pytest.raises(InvalidInput, match="level is easy or hard") as refused:
            await client.facts(EnvironmentSpec(name="strict", params={"level": "odd"}))
        assert refused.value.field == "environment.params"
        tasks = [Task(task="{}", seed=seed) for seed in (3, 4)]
        assert await client.repeatability(ECHO, tasks) == ""
        assert "turn 0 differs" in await client.repeatability(EnvironmentSpec(name="clock"), tasks)
        shown = await client.observations(ECHO, tasks, job_id="job-1")
        assert [getattr(one, "messages", ())[0].content for one in shown] == ["say 3", "say 4"]


@pytest.mark.parametrize(
    ("crash_at", "last"),
    [("environment.before_play:3", "d"), ("environment.after_play:3", "d"), ("environment.lost_child", "die")],
)
def test_a_service_that_was_killed_in_a_step_has_lost_its_sessions_and_they_go_on_by_their_histories(
    crash_at: str, last: str
) -> None:
    """The third play is the second step: the first began the session, the second turn 0."""
    service = Service()
    service.start(crash_at=crash_at)
    table = EnvironmentSpec(name="nasty")

    async def run() -> list[str]:
        async with client_of(service, max_attempts=1) as client:
            await client.open(table, [new(0), new(1)], idle_s=600.0)
            first = await client.step(steps(0, "a", "b"))
            with pytest.raises(EnvironmentUnavailable):
                await client.step(steps(1, "c", last))
            assert service.process is not None
            assert service.process.wait(120.0) == -signal.SIGKILL
            service.start()
            assert [reason_of(one) for one in await client.step(steps(1, "c", "d"))] == ["lost", "lost"]
            again = [new(number, history=[played("ab"[number], one)]) for number, one in enumerate(first)]
            opened = await client.open(table, again, idle_s=600.0)
            assert [reply_of(one) for one in opened] == [reply_of(one) for one in first]
            return [text_of(one) for one in await client.step(steps(1, "c", "d"))]

    try:
        assert asyncio.run(run()) == ["a c", "b d"]
        assert service.process is not None
        started = descendants(service.process.pid)
        assert service.end(signal.SIGTERM) == 0
        assert not living(started)
    finally:
        service.end()


def steps(turn: int, *texts: str) -> list[Step]:
    return [Step(session_id=f"s{number}", turn=turn, message=said(text)) for number, text in enumerate(texts)]
