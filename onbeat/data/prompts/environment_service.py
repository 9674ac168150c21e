"""The reward service, as a process without an event loop asks it: a trainer at a job's start, a gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx

from contracts.environments.service import EnvironmentFacts, Failure, InitialObservation, Task
from contracts.errors import DeadlineExceeded, EnvironmentUnavailable
from contracts.settings import StackSettings
from contracts.spec.environment import EnvironmentSpec
from onbeat.base.http.asker import asker_headers
from onbeat.base.http.outgoing import make_async_client
from onbeat.base.process.dependency import Dependency
from onbeat.base.process.waiting import run_apart
from onbeat.environments.client import EnvironmentClient, reward_service

T = TypeVar("T")

MAX_ANSWER_BYTES = 2**30
"""As many sessions as a call may have, with a reply of 64 KiB each."""


class EnvironmentService:
    """An EnvironmentQueries over HTTP; each call has an event loop and a connection of its own."""

    def __init__(
        self, settings: StackSettings, *, job_id: str = "", deadline_s: float | None = None, outlasts: bool = False
    ) -> None:
        """deadline_s: for one call with its repeats; None gives it twice environment.request_timeout_s. outlasts:
        whether a service that is away is waited for up to that deadline, and DeadlineExceeded raised past it."""
        self._settings = settings
        self._job_id = job_id
        self._deadline_s = deadline_s
        self._outlasts = outlasts

    def facts(self, environment: EnvironmentSpec) -> EnvironmentFacts:
        return self._ask(environment, lambda client: client.facts(environment))

    def observations(self, environment: EnvironmentSpec, tasks: Sequence[Task]) -> list[InitialObservation | Failure]:
        return self._ask(environment, lambda client: client.observations(environment, tasks, job_id=self._job_id))

    def repeatability(self, environment: EnvironmentSpec, tasks: Sequence[Task]) -> str:
        return self._ask(environment, lambda client: client.repeatability(environment, tasks))

    def _ask(self, environment: EnvironmentSpec, call: Callable[[EnvironmentClient], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with environment_http(self._settings) as http:
                service = None
                if self._outlasts:
                    service = reward_service(http, key=self._settings.reward_key)
                client = client_for(http, environment, self._settings, deadline_s=self._deadline_s, service=service)
                try:
                    return await call(client)
                except EnvironmentUnavailable as problem:
                    if service is None or problem.is_doubtful:
                        raise
                    raise DeadlineExceeded(
                        f"waited {self._deadline_s:g} s for the {service.name} {service.why}",
                        cure="start it, or raise timeouts.dependency_s",
                    ) from problem

        return run_apart(ask())


def environment_http(settings: StackSettings) -> httpx.AsyncClient:
    """Connections to the reward service; each request says how long it may take."""
    return make_async_client(settings.reward_url, headers=asker_headers(settings), max_answer_bytes=MAX_ANSWER_BYTES)


def client_for(
    http: httpx.AsyncClient,
    environment: EnvironmentSpec,
    settings: StackSettings,
    *,
    deadline_s: float | None = None,
    service: Dependency | None = None,
) -> EnvironmentClient:
    """Returns a client with a job's own deadlines: a request that hangs may be made once more, and no oftener.

    service: whose absence a call outlasts, up to deadline_s.
    """
    return EnvironmentClient(
        http=http,
        key=settings.reward_key,
        request_timeout_s=environment.request_timeout_s,
        deadline_s=2 * environment.request_timeout_s if deadline_s is None else deadline_s,
        service=service,
    )
