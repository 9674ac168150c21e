"""The gateway and the reward service answer no client without a key and no web page, and no error without a status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace

from broker.connection.client import connect
from contracts.errors import InvalidInput, OnbeatError, Refusal, SpecRefused
from contracts.settings import StackSettings
from gateway.app import create_app as create_gateway
from gateway.services import Services
from onbeat.base.http.access import OPEN_PATHS
from reward_service.app import create_app as create_reward_service
from reward_service.scorers import texts  # noqa: F401  (its errors are part of the tree)
from tests.served import asked

MakeApp = Callable[[StackSettings], FastAPI]


@pytest.fixture
def make_gateway() -> Iterator[MakeApp]:
    made: list[Services] = []

    def make(settings: StackSettings) -> FastAPI:
        services = Services(settings=settings, broker=connect(settings))
        made.append(services)
        return create_gateway(services)

    yield make
    for services in made:
        services.broker.close()


@pytest.fixture
def make_reward_service() -> Iterator[MakeApp]:
    made: list[FastAPI] = []

    def make(settings: StackSettings) -> FastAPI:
        made.append(create_reward_service(settings, num_threads=1))
        return made[-1]

    yield make
    for app in made:
        app.state.scorers.close()
        app.state.environments.shut()


@pytest.fixture(params=["gateway", "reward_service"])
def service(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def make_app(service: str, make_gateway: MakeApp, make_reward_service: MakeApp) -> MakeApp:
    return make_gateway if service == "gateway" else make_reward_service


@pytest.fixture
def key(service: str, settings: StackSettings) -> str:
    return settings.api_key if service == "gateway" else settings.reward_key


def ask(app: FastAPI, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    return asked(app, method, path, headers=headers)


def every_path(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route, with an id in the place of its parameter, and of what is no route."""
    found = [("GET", "/docs"), ("GET", "/redoc"), ("GET", "/openapi.json"), ("GET", "/nothing"), ("BREW", "/metrics")]
    for path, operations in app.openapi()["paths"].items():
        found += [(method.upper(), path.replace("{job_id}", "job-none")) for method in operations]
    return found


def test_only_health_and_readiness_are_answered_without_the_key(make_app: MakeApp, settings: StackSettings) -> None:
    app = make_app(settings)
    asked = every_path(app)
    assert len(asked) >= 9
    for method, path in asked:
        for authorization in ("", "Bearer wrong", "Basic dGVzdC1rZXk6", "Bearer ", "bearer", "Bearer test-key2"):
            answer = ask(app, method, path, {"Authorization": authorization} if authorization else {})
            if path in OPEN_PATHS:
                assert answer.status_code == 200
            else:
                assert (answer.status_code, answer.json()["field"]) == (401, "Authorization"), (method, path)
                assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_the_key_opens_metrics_and_two_keys_open_nothing(make_app: MakeApp, key: str, settings: StackSettings) -> None:
    app = make_app(settings)
    bearer = {"Authorization": f"Bearer {key}"}
    assert ask(app, "GET", "/metrics", bearer).headers["Content-Type"].startswith("text/plain; version=")
    assert ask(app, "GET", "/metrics", {"authorization": f"bearer {key}"}).status_code == 200
    assert ask(app, "GET", "/metrics", {"Authorization": f"Bearer {key}, Bearer {key}"}).status_code == 401
    other_key = settings.api_key if key == settings.reward_key else settings.reward_key
    assert ask(app, "GET", "/metrics", {"Authorization": f"Bearer {other_key}"}).status_code == 401


OURS = (
    "localhost:8000",
    "LocalHost.",
    "127.0.0.1:8000",
    "10.1.2.3",
    "[::1]:8000",
    "rewards.internal:80",
    "Rewards.Internal",
)
OTHERS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", ""),
    *("evil.example@localhost", "localhost:8000, evil.example"),
)


def test_a_name_that_a_page_lets_point_here_is_refused(make_app: MakeApp, key: str, settings: StackSettings) -> None:
    app = make_app(replace(settings, allowed_hosts="gateway, rewards.internal"))
    for path in ("/healthz", "/metrics"):
        for host in (*OURS, *OTHERS):
            answer = ask(app, "GET", path, {"Host": host, "Authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if host in OURS else 421), host
            assert host in OURS or answer.json()["field"] == "Host", host


PAGES = [
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://localhost:3000"}, 403),
    ({"Origin": "http://localhost"}, 200),
    ({"Origin": "https://localhost"}, 200),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Sec-Fetch-Site": "none"}, 200),
    ({"Sec-Fetch-Site": "same-origin"}, 200),
]
"""What a browser says of the page that asks → the status that it is answered with."""


def test_a_page_of_another_origin_is_refused_even_with_the_key(
    make_app: MakeApp, key: str, settings: StackSettings
) -> None:
    app = make_app(settings)
    for headers, status in PAGES:
        for path in ("/readyz", "/metrics"):
            answer = ask(app, "GET", path, headers | {"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, headers
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("bad", ["", "two words", "schlüssel", "line\nbreak"])
def test_no_service_is_made_without_a_key_that_a_header_can_carry(
    bad: str, make_app: MakeApp, settings: StackSettings
) -> None:
    with pytest.raises(InvalidInput, match="KEY"):
        make_app(replace(settings, api_key=bad, reward_key=bad))


def test_what_is_no_host_name_is_refused_as_a_setting(make_app: MakeApp, settings: StackSettings) -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_ALLOWED_HOSTS"):
        make_app(replace(settings, allowed_hosts="gateway, http://gateway:8000"))


def tree(branch: type[OnbeatError] = OnbeatError) -> list[type[OnbeatError]]:
    return [branch, *(below for child in branch.__subclasses__() for below in tree(child))]


def test_every_error_of_the_tree_is_answered_with_its_status_and_its_sentence(
    make_app: MakeApp, key: str, settings: StackSettings
) -> None:
    app = make_app(settings)
    kinds = tree()
    assert len(kinds) >= 16

    def raise_one(number: int) -> None:
        if kinds[number] is SpecRefused:
            raise SpecRefused([Refusal(field="thing", problem="what is wrong", cure="do this")])
        raise kinds[number]("what is wrong", field="thing", cure="do this")

    app.add_api_route("/raise/{number}", raise_one)
    for number, kind in enumerate(kinds):
        answer = ask(app, "GET", f"/raise/{number}", {"Authorization": f"Bearer {key}"})
        assert answer.headers["Content-Type"] == "application/problem+json"
        problem = answer.json()
        assert (answer.status_code, problem["status"]) == (kind.status, kind.status)
        assert (problem["detail"], problem["field"], problem["cure"]) == ("what is wrong", "thing", "do this")


def test_a_new_branch_of_the_tree_must_say_its_status() -> None:
    with pytest.raises(TypeError, match="needs the HTTP status"):
        type("Forgotten", (OnbeatError,), {})
    branch = type("Branch", (InvalidInput,), {})
    assert issubclass(branch, InvalidInput)
    assert branch.status is HTTPStatus.UNPROCESSABLE_ENTITY
