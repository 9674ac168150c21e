"""Asks the reward service for initial observations, sessions and steps.

A failure of the service is no failure of a session.

    POST {reward_url}/v1/… (MessagePack) ─▶ a result for each session: Turned, or a typed Failure
             ▲                                ├▶ InvalidInput: the request itself is wrong; no retry
             └── back-off with full jitter ◀──┴─ no answer, 5xx, nonsense ──(no attempt left)──▶ EnvironmentUnavailable

Who plays batches waits for a service that is away (`service`): only where it answers others can a batch be the cause.
Each call may be repeated: a session that begins again is begun anew, a step that was played has its reply once more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import httpx

from contracts.answers import ProblemDetails
from contracts.encoding.wire import Record, decode, decode_json, encode
from contracts.environments import service as wire
from contracts.errors import ContractViolation, EnvironmentUnavailable, InvalidInput, RewardUnavailable
from contracts.spec.environment import EnvironmentSpec
from onbeat.base.http.outgoing import answer_text, check_status, in_doubt, legible, unanswered
from onbeat.base.process.dependency import REWARD_SERVICE, Dependency
from onbeat.base.process.waiting import backoff, tried_again
from onbeat.base.telemetry.correlation import current_facts, trace_headers

MEDIA_TYPE = "application/msgpack"
MAX_ATTEMPTS = 8
PROBE_S = 3.0
"""Deadline of a probe."""
UNANSWERED_CURE = "raise environment.request_timeout_s, or look at the reward service's log"
MAX_CALL_BYTES = 32 * 1024 * 1024
"""The service takes twice as many; a call beyond it is made in parts."""

A = TypeVar("A", bound=Record)
T = TypeVar("T")


@dataclass(kw_only=True)
class EnvironmentClient:
    """The reward service, for one process: a generator's turns, a trainer's initial observations, a gateway's check.

    Every method raises EnvironmentUnavailable where no usable answer comes in `max_attempts` requests or by the
    deadline, and InvalidInput where the service refuses the request, with the service's own field and cure.
    """

    http: httpx.AsyncClient
    """With the reward service as its base URL."""
    key: str
    request_timeout_s: float
    """For one request."""
    max_attempts: int = MAX_ATTEMPTS
    deadline_s: float | None = None
    """For a call with all its attempts; None leaves it to them."""
    service: Dependency | None = None
    """Its absence within deadline_s is outlasted, and what is in doubt is asked for at most `max_attempts` times."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    async def facts(self, environment: EnvironmentSpec) -> wire.EnvironmentFacts:
        """InvalidInput names `environment.name` or `environment.params`."""
        return await self._post("/v1/environments/check", wire.table_of(environment), wire.EnvironmentFacts)

    async def repeatability(self, environment: EnvironmentSpec, tasks: Sequence[wire.Task]) -> str:
        """Plays the tasks twice, and returns how the two differ; "" where they don't."""
        limit_s = environment.step_timeout_s
        request = wire.RepeatabilityRequest(
            environment=wire.table_of(environment), tasks=tuple(tasks), step_timeout_s=limit_s
        )
        return (await self._post("/v1/environments/repeatability", request, wire.RepeatabilityResponse)).problem

    async def observations(
        self, environment: EnvironmentSpec, tasks: Sequence[wire.Task], *, job_id: str = ""
    ) -> list[wire.InitialObservation | wire.Failure]:
        """Returns the initial observations of the tasks, in their order."""
        observations: list[wire.InitialObservation | wire.Failure] = []
        for part in _parts(tasks, lambda task: len(task.task)):
            request = wire.InitialObservationRequest(
                environment=wire.table_of(environment),
                tasks=tuple(part),
                step_timeout_s=environment.step_timeout_s,
                job_id=job_id,
            )
            observations += (
                await self._post("/v1/initial-observations", request, wire.InitialObservationResponse, number=len(part))
            ).observations
        return observations

    async def open(
        self, environment: EnvironmentSpec, sessions: Sequence[wire.NewSession], *, idle_s: float, job_id: str = ""
    ) -> list[wire.Result]:
        """Begins sessions, each where its history ends; a session with the id of another ends that other."""
        results: list[wire.Result] = []
        for part in _parts(
            sessions, lambda new: len(new.task.task) + sum(len(turn.message.content) + 128 for turn in new.history)
        ):
            request = wire.OpenRequest(
                environment=wire.table_of(environment),
                sessions=tuple(part),
                step_timeout_s=environment.step_timeout_s,
                idle_s=idle_s,
                job_id=job_id,
            )
            results += (await self._post("/v1/sessions", request, wire.SessionResponse, number=len(part))).results
        return results

    async def step(self, steps: Sequence[wire.Step]) -> list[wire.Result]:
        """Returns the replies to the model's messages, in their order."""
        results: list[wire.Result] = []
        for part in _parts(steps, lambda step: len(step.message.content)):
            request = wire.StepRequest(steps=tuple(part))
            results += (await self._post("/v1/steps", request, wire.SessionResponse, number=len(part))).results
        return results

    async def renew(self, session_ids: Sequence[str]) -> None:
        """Says that they are still needed."""
        for part in _parts(session_ids, len):
            await self._post("/v1/sessions/renew", wire.RenewRequest(session_ids=tuple(part)), wire.RenewResponse)

    async def close(self, session_ids: Sequence[str]) -> None:
        """Ends those that are open."""
        for part in _parts(session_ids, len):
            await self._post("/v1/sessions/close", wire.CloseRequest(session_ids=tuple(part)), wire.CloseResponse)

    async def _post(self, path: str, request: Record, kind: type[A], *, number: int | None = None) -> A:
        """Returns one answer, after as many requests as it takes. number: of the results that it must have."""
        body = encode(request)
        ends_s = self.clock() + self.deadline_s if self.deadline_s is not None else float("inf")
        service = self.service

        async def once() -> A:
            answer = await self._once(path, body, kind, left_s=max(0.001, ends_s - self.clock()))
            return answer if number is None else _as_many(answer, number)

        async def ask() -> A:
            return await (once() if service is None else service.outlast(once, deadline_s=ends_s - self.clock()))

        def helps(error: Exception, pause_s: float) -> bool:
            may_help = isinstance(error, EnvironmentUnavailable) and (service is None or error.is_doubtful)
            if may_help and service is not None:
                service.tried_again(str(current_facts().get("job", "")), f"{error} ({UNANSWERED_CURE})")
            return may_help and self.clock() + pause_s < ends_s

        pauses = islice(backoff(base_s=0.5, cap_s=30.0, jitter=self.jitter), self.max_attempts - 1)
        return await tried_again(path, ask, pauses=pauses, helps=helps, sleep=self.sleep)

    async def _once(self, path: str, body: bytes, kind: type[A], *, left_s: float) -> A:
        """Makes one request. Raises EnvironmentUnavailable if it may be repeated, InvalidInput if not."""
        limit_s = min(self.request_timeout_s, left_s)
        headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "authorization": f"Bearer {self.key}"}
        try:
            response = self.http.post(path, content=body, headers=headers | trace_headers(), timeout=limit_s)
            answer = await asyncio.wait_for(response, limit_s)
        except (httpx.RequestError, TimeoutError) as error:
            raise unanswered(error, EnvironmentUnavailable) from error
        if not check_status(answer, EnvironmentUnavailable, of="the reward service"):
            raise _refusal(path, answer)
        try:
            return decode(answer.content, kind)
        except (ContractViolation, InvalidInput) as error:
            problem = EnvironmentUnavailable(f"the reward service's answer does not decode: {error}")
            raise in_doubt(problem) from error


def reward_service(http: httpx.AsyncClient, *, key: str, jitter: Callable[[], float] = random.random) -> Dependency:
    """Returns the reward service as the process that has this client meets it. A probe needs the key, and no child."""
    headers = {"authorization": f"Bearer {key}"}

    async def look() -> None:
        try:
            answer = await http.get("/v1/environments", headers=headers, timeout=PROBE_S)
        except httpx.RequestError as error:
            raise unanswered(error, RewardUnavailable) from error
        check_status(answer, RewardUnavailable, of="the reward service")

    return Dependency(REWARD_SERVICE, str(http.base_url).rstrip("/"), probe=look, jitter=jitter)


def _refusal(path: str, answer: httpx.Response) -> InvalidInput:
    try:
        problem = decode_json(legible(answer), ProblemDetails)
    except InvalidInput:
        return InvalidInput(f"the reward service refused {path} with {answer.status_code}: {answer_text(answer)}")
    return InvalidInput(problem.detail, field=problem.field, cure=problem.cure)


def _as_many(answer: A, number: int) -> A:
    """Raises EnvironmentUnavailable for an answer with more or fewer results than there are questions."""
    results = (
        answer.observations if isinstance(answer, wire.InitialObservationResponse) else getattr(answer, "results", ())
    )
    if len(results) != number:
        problem = f"the reward service answered {len(results)} results for {number} sessions"
        raise in_doubt(EnvironmentUnavailable(problem))
    return answer


def _parts(items: Sequence[T], size: Callable[[T], int]) -> list[Sequence[T]]:
    """Returns the items in calls that are neither too many nor too large."""
    parts: list[list[T]] = []
    num_bytes = MAX_CALL_BYTES
    for item in items:
        num_bytes += 4 * size(item) + 256
        if num_bytes > MAX_CALL_BYTES or len(parts[-1]) >= wire.MAX_SESSIONS_OF_A_CALL:
            parts.append([])
            num_bytes = 4 * size(item) + 256
        parts[-1].append(item)
    return list(parts)
