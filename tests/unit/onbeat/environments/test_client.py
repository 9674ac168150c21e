"""The client of the reward service: what it repeats, what it doesn't, and when it gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest

from contracts.answers import problem_body
from contracts.encoding.wire import decode, encode
from contracts.environments.messages import Message
from contracts.environments.service import EnvironmentFacts, Failure, SessionResponse, Step, StepRequest
from contracts.errors import EnvironmentUnavailable, InvalidInput
from contracts.spec.environment import EnvironmentSpec
from onbeat.environments import client as client_module
from onbeat.environments.client import EnvironmentClient

T = TypeVar("T")
Answer = Callable[[httpx.Request], httpx.Response]
LOST = Failure(reason="lost", detail="gone")


def lost_for_all(request: httpx.Request) -> httpx.Response:
    steps = decode(request.content, StepRequest).steps
    return httpx.Response(200, content=encode(SessionResponse(results=(LOST,) * len(steps))))


def status(code: int) -> Answer:
    return lambda request: httpx.Response(code, text="because")


def refuse_connection(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def nonsense(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b"\xc1")


def too_few(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=encode(SessionResponse(results=())))


class Service:
    """Plays the answers in order, the last one for ever, and remembers the requests and the pauses between them."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.slept_s: list[float] = []
        self.now_s = 0.0

    def ask(self, call: Callable[[EnvironmentClient], Awaitable[T]], *, deadline_s: float | None = None) -> T:
        async def run() -> T:
            async with httpx.AsyncClient(transport=httpx.MockTransport(self._handle), base_url="http://e") as http:
                return await call(
                    EnvironmentClient(
                        http=http,
                        key="environment-key",
                        request_timeout_s=5.0,
                        max_attempts=3,
                        deadline_s=deadline_s,
                        sleep=self._sleep,
                        jitter=lambda: 0.5,
                        clock=lambda: self.now_s,
                    )
                )

        return asyncio.run(run())

    def _handle(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer environment-key"
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request)

    async def _sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def steps(number: int) -> list[Step]:
    message = Message(role="assistant", content="x")
    return [Step(session_id=str(one), turn=0, message=message) for one in range(number)]


@pytest.mark.parametrize("fault", [status(500), status(503), status(429), refuse_connection, nonsense, too_few])
def test_what_may_be_repeated_is_repeated_with_back_off(fault: Answer) -> None:
    service = Service(fault, fault, lost_for_all)
    assert service.ask(lambda client: client.step(steps(2))) == [LOST, LOST]
    assert service.slept_s == [0.25, 0.5]


def test_it_gives_up_after_its_attempts_and_never_answers_in_the_services_place() -> None:
    service = Service(status(500))
    with pytest.raises(EnvironmentUnavailable, match="500: because"):
        service.ask(lambda client: client.step(steps(1)))
    assert len(service.requests) == 3


def test_it_gives_up_at_its_deadline_whatever_its_attempts() -> None:
    service = Service(status(500))
    with pytest.raises(EnvironmentUnavailable):
        service.ask(lambda client: client.step(steps(1)), deadline_s=0.3)
    assert len(service.requests) == 2


def test_a_refusal_is_not_repeated_and_names_the_field_and_the_cure() -> None:
    body = problem_body(422, "no such", field="environment.name", cure="another")
    service = Service(lambda request: httpx.Response(422, content=body))
    with pytest.raises(InvalidInput, match="no such") as refused:
        service.ask(lambda client: client.facts(EnvironmentSpec(name="x")))
    assert (refused.value.field, refused.value.cure) == ("environment.name", "another")
    assert len(service.requests) == 1
    with pytest.raises(InvalidInput, match="refused /v1/steps with 418"):
        Service(status(418)).ask(lambda client: client.step(steps(1)))
    with pytest.raises(EnvironmentUnavailable, match="refuses this process with 401"):
        Service(status(401)).ask(lambda client: client.step(steps(1)))


def test_large_calls_are_made_in_parts_and_answered_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contracts.environments.service.MAX_SESSIONS_OF_A_CALL", 2)
    service = Service(lost_for_all)
    assert service.ask(lambda client: client.step(steps(5))) == [LOST] * 5
    assert [len(decode(one.content, StepRequest).steps) for one in service.requests] == [2, 2, 1]
    monkeypatch.setattr(client_module, "MAX_CALL_BYTES", 300)
    service = Service(lost_for_all)
    assert service.ask(lambda client: client.step(steps(2))) == [LOST] * 2
    assert len(service.requests) == 2
    assert service.ask(lambda client: client.step([])) == []


def test_facts_are_the_services() -> None:
    facts = EnvironmentFacts(deterministic=False, version="1")
    service = Service(lambda request: httpx.Response(200, content=encode(facts)))
    assert service.ask(lambda client: client.facts(EnvironmentSpec(name="x"))) == facts
