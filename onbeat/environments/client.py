"""Asks the reward service: for openings, sessions, steps. A failure of the service is no failure of a session.

    POST {reward_url}/v1/… (MessagePack) ─▶ a result for each session: Turned, or a typed Failure
             ▲                                ├▶ InvalidInput: the request itself is wrong; no retry
             └── back-off with full jitter ◀──┴─ no answer, 5xx, nonsense ──(no attempt left)──▶ EnvironmentUnavailable

Who plays batches waits for a service that is away (`service`): only where it answers others can a batch be the cause.
Each call may be repeated: a session that begins again is begun anew, a step that was played has its reply once more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx

from contracts.answers import ProblemDetails
from contracts.encoding.wire import Record, decode, decode_json, encode
from contracts.environments.service import (
    MAX_SESSIONS_OF_A_CALL,
    CanaryRequest,
    CanaryResponse,
    CloseRequest,
    CloseResponse,
    EnvironmentFacts,
    EnvironmentNames,
    EnvironmentTable,
    Failure,
    NewSession,
    Opening,
    OpeningRequest,
    OpeningResponse,
    OpenRequest,
    RenewRequest,
    RenewResponse,
    Result,
    SessionResponse,
    Step,
    StepRequest,
    Task,
)
from contracts.errors import ContractViolation, EnvironmentUnavailable, InvalidInput
from onbeat.http_service.outgoing import check_status, in_doubt, legible, said, unanswered
from onbeat.process.dependency import Dependency
from onbeat.telemetry.correlation import trace_headers

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/msgpack"
BACKOFF_BASE_S = 0.5
BACKOFF_CAP_S = 30.0
MAX_ATTEMPTS = 8
MAX_CALL_BYTES = 32 * 1024 * 1024
"""The service takes twice as many; a call beyond it is made in parts."""

A = TypeVar("A", bound=Record)
T = TypeVar("T")


class EnvironmentClient:
    """The reward service, for one process: a generator's turns, a trainer's openings, a gateway's check.

    Every method raises EnvironmentUnavailable where no usable answer comes in `max_attempts` requests or by the
    deadline, and InvalidInput where the service refuses the request, with the service's own field and cure.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        key: str,
        request_timeout_s: float,
        max_attempts: int = MAX_ATTEMPTS,
        deadline_s: float | None = None,
        service: Dependency | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """http: with the reward service as its base URL. request_timeout_s: for one request.

        deadline_s: for a call with all its attempts; None leaves it to them. With a service, its absence within that
        time is outlasted, and what is in doubt is asked for at most `max_attempts` times.
        """
        self._http = http
        self._headers = {"content-type": MEDIA_TYPE, "accept": MEDIA_TYPE, "authorization": f"Bearer {key}"}
        self._request_timeout_s = request_timeout_s
        self._max_attempts = max_attempts
        self._deadline_s = deadline_s
        self._service = service
        self._sleep = sleep
        self._jitter = jitter
        self._clock = clock

    async def names(self) -> tuple[str, ...]:
        """What a spec may name."""
        return (await self._get("/v1/environments", EnvironmentNames)).environments

    async def facts(self, environment: EnvironmentTable) -> EnvironmentFacts:
        """InvalidInput names `environment.name` or `environment.params`."""
        return await self._post("/v1/environments/check", environment, EnvironmentFacts)

    async def canary(self, environment: EnvironmentTable, tasks: Sequence[Task], *, step_timeout_s: float) -> str:
        """What differs where it is played twice; "" where nothing does."""
        request = CanaryRequest(environment=environment, tasks=tuple(tasks), step_timeout_s=step_timeout_s)
        return (await self._post("/v1/environments/canary", request, CanaryResponse)).problem

    async def openings(
        self, environment: EnvironmentTable, tasks: Sequence[Task], *, step_timeout_s: float, job_id: str = ""
    ) -> list[Opening | Failure]:
        """How the tasks begin, in their order."""
        found: list[Opening | Failure] = []
        for part in _parts(tasks, lambda task: len(task.task)):
            request = OpeningRequest(
                environment=environment, tasks=tuple(part), step_timeout_s=step_timeout_s, job_id=job_id
            )
            found += (await self._post("/v1/openings", request, OpeningResponse, number=len(part))).openings
        return found

    async def open(
        self,
        environment: EnvironmentTable,
        sessions: Sequence[NewSession],
        *,
        step_timeout_s: float,
        idle_s: float,
        job_id: str = "",
    ) -> list[Result]:
        """Begins sessions, each where its history ends; one that has the id of another ends that one."""
        found: list[Result] = []
        for part in _parts(
            sessions, lambda new: len(new.task.task) + sum(len(one.message.content) + 128 for one in new.history)
        ):
            request = OpenRequest(
                environment=environment,
                sessions=tuple(part),
                step_timeout_s=step_timeout_s,
                idle_s=idle_s,
                job_id=job_id,
            )
            found += (await self._post("/v1/sessions", request, SessionResponse, number=len(part))).results
        return found

    async def step(self, steps: Sequence[Step]) -> list[Result]:
        """Replies to the model's messages, in their order."""
        found: list[Result] = []
        for part in _parts(steps, lambda step: len(step.message.content)):
            request = StepRequest(steps=tuple(part))
            found += (await self._post("/v1/steps", request, SessionResponse, number=len(part))).results
        return found

    async def renew(self, session_ids: Sequence[str]) -> int:
        """Says that they are still needed; answers how many of them there are."""
        num_open = 0
        for part in _parts(session_ids, len):
            num_open += (
                await self._post("/v1/sessions/renew", RenewRequest(session_ids=tuple(part)), RenewResponse)
            ).num_open
        return num_open

    async def close(self, session_ids: Sequence[str]) -> int:
        """Ends those that are open, and says how many there were."""
        num_closed = 0
        for part in _parts(session_ids, len):
            request = CloseRequest(session_ids=tuple(part))
            num_closed += (await self._post("/v1/sessions/close", request, CloseResponse)).num_closed
        return num_closed

    async def _get(self, path: str, kind: type[A]) -> A:
        return await self._tried(
            path, lambda timeout_s: self._http.get(path, headers=self._headers, timeout=timeout_s), kind, decode_json
        )

    async def _post(self, path: str, request: Record, kind: type[A], *, number: int | None = None) -> A:
        """number: of the results that the answer must have."""
        body = encode(request)

        def read(content: bytes, kind: type[A]) -> A:
            answer = decode(content, kind)
            return answer if number is None else _as_many(answer, number)

        return await self._tried(
            path,
            lambda timeout_s: self._http.post(
                path, content=body, headers=self._headers | trace_headers(), timeout=timeout_s
            ),
            kind,
            read,
        )

    async def _tried(
        self,
        path: str,
        send: Callable[[float], Awaitable[httpx.Response]],
        kind: type[A],
        read: Callable[[bytes, type[A]], A],
    ) -> A:
        """One answer of that kind, of as many requests as it takes."""
        ends_s = self._clock() + self._deadline_s if self._deadline_s is not None else float("inf")
        service = self._service
        for attempt in itertools.count(1):

            async def once() -> A:
                return await self._once(path, send, kind, read, max(0.001, ends_s - self._clock()))

            try:
                if service is None:
                    return await once()
                return await service.outlast(once, deadline_s=ends_s - self._clock())
            except EnvironmentUnavailable as problem:
                delay_s = self._jitter() * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** (attempt - 1))
                is_over = service is not None and not problem.is_doubtful
                if is_over or attempt >= self._max_attempts or self._clock() + delay_s >= ends_s:
                    raise
                log.warning(
                    "%s, attempt %d of %d: %s; again in %.1f s", path, attempt, self._max_attempts, problem, delay_s
                )
                await self._sleep(delay_s)
        raise AssertionError("unreachable")

    async def _once(
        self,
        path: str,
        send: Callable[[float], Awaitable[httpx.Response]],
        kind: type[A],
        read: Callable[[bytes, type[A]], A],
        left_s: float,
    ) -> A:
        """Makes one request. Raises EnvironmentUnavailable if it may be repeated, InvalidInput if not."""
        limit_s = min(self._request_timeout_s, left_s)
        try:
            answer = await asyncio.wait_for(send(limit_s), limit_s)
        except (httpx.RequestError, TimeoutError) as error:
            raise unanswered(error, EnvironmentUnavailable) from error
        if not check_status(answer, EnvironmentUnavailable, of="the reward service"):
            raise _refusal(path, answer)
        try:
            return read(answer.content, kind)
        except (ContractViolation, InvalidInput) as error:
            problem = EnvironmentUnavailable(f"the reward service's answer does not decode: {error}")
            raise in_doubt(problem) from error


def _refusal(path: str, answer: httpx.Response) -> InvalidInput:
    try:
        problem = decode_json(legible(answer), ProblemDetails)
    except InvalidInput:
        return InvalidInput(f"the reward service refused {path} with {answer.status_code}: {said(answer)}")
    return InvalidInput(problem.detail, field=problem.field, cure=problem.cure)


def _as_many(answer: A, number: int) -> A:
    """Raises EnvironmentUnavailable for an answer with more or fewer results than there are questions."""
    found = answer.openings if isinstance(answer, OpeningResponse) else getattr(answer, "results", ())
    if len(found) != number:
        problem = f"the reward service answered {len(found)} results for {number} sessions"
        raise in_doubt(EnvironmentUnavailable(problem))
    return answer


def _parts(items: Sequence[T], size: Callable[[T], int]) -> list[Sequence[T]]:
    """The items in calls that are neither too many nor too large."""
    parts: list[list[T]] = []
    num_bytes = MAX_CALL_BYTES
    for item in items:
        num_bytes += 4 * size(item) + 256
        if num_bytes > MAX_CALL_BYTES or len(parts[-1]) >= MAX_SESSIONS_OF_A_CALL:
            parts.append([])
            num_bytes = 4 * size(item) + 256
        parts[-1].append(item)
    return list(parts)
