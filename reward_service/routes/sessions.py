"""The HTTP side of environments: what onbeat/environments/client.py talks to."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from contracts.environments.service import (
    CanaryRequest,
    CanaryResponse,
    CloseRequest,
    CloseResponse,
    EnvironmentNames,
    EnvironmentTable,
    Failure,
    Opening,
    OpeningRequest,
    OpeningResponse,
    OpenRequest,
    RenewRequest,
    RenewResponse,
    Result,
    SessionResponse,
    StepRequest,
)
from contracts.errors import OnbeatError, Unavailable
from onbeat.http_service import formats
from onbeat.http_service.bodies import json_answer, read_body
from onbeat.http_service.connected import CLIENT_GONE, while_connected
from onbeat.http_service.problems import Problem
from reward_service.metrics import EnvironmentMetrics
from reward_service.player import registry
from reward_service.playing.pool import EnvironmentPool

LARGE_BYTES = 256 * 1024
"""A body of this size is decoded beside the event loop."""

T = TypeVar("T")
Call = Callable[[EnvironmentPool, T], Awaitable[object]]

router = APIRouter()


@router.post("/v1/openings")
async def openings(request: Request) -> Response:
    """OpeningRequest → OpeningResponse."""

    async def call(pool: EnvironmentPool, asked: OpeningRequest) -> OpeningResponse:
        return OpeningResponse(openings=tuple(map(_opening, await pool.openings(asked))))

    return await _answer(request, OpeningRequest, call)


@router.post("/v1/sessions")
async def sessions(request: Request) -> Response:
    """OpenRequest → SessionResponse."""

    async def call(pool: EnvironmentPool, asked: OpenRequest) -> SessionResponse:
        return SessionResponse(results=tuple(await pool.open(asked)))

    return await _answer(request, OpenRequest, call)


@router.post("/v1/steps")
async def steps(request: Request) -> Response:
    """StepRequest → SessionResponse."""

    async def call(pool: EnvironmentPool, asked: StepRequest) -> SessionResponse:
        return SessionResponse(results=tuple(await pool.step(asked.steps)))

    return await _answer(request, StepRequest, call)


@router.post("/v1/sessions/renew")
async def renew(request: Request) -> Response:
    """RenewRequest → RenewResponse."""

    async def call(pool: EnvironmentPool, asked: RenewRequest) -> RenewResponse:
        return RenewResponse(num_open=pool.renew(asked.session_ids))

    return await _answer(request, RenewRequest, call)


@router.post("/v1/sessions/close")
async def close(request: Request) -> Response:
    """CloseRequest → CloseResponse."""

    async def call(pool: EnvironmentPool, asked: CloseRequest) -> CloseResponse:
        return CloseResponse(num_closed=pool.close(asked.session_ids))

    return await _answer(request, CloseRequest, call)


@router.post("/v1/environments/check")
async def check(request: Request) -> Response:
    """EnvironmentTable → EnvironmentFacts. Problem 422 names the field, 503 says why none can be loaded now."""

    async def call(pool: EnvironmentPool, asked: EnvironmentTable) -> object:
        loaded = await pool.facts(asked)
        if loaded.failure is not None and loaded.field:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, loaded.failure.detail, field=loaded.field)
        if loaded.facts is None:
            raise Unavailable(loaded.failure.detail if loaded.failure else "it was not loaded")
        return loaded.facts

    return await _answer(request, EnvironmentTable, call)


@router.post("/v1/environments/canary")
async def canary(request: Request) -> Response:
    """CanaryRequest → CanaryResponse."""

    async def call(pool: EnvironmentPool, asked: CanaryRequest) -> CanaryResponse:
        return CanaryResponse(problem=await pool.canary(asked))

    return await _answer(request, CanaryRequest, call)


@router.get("/v1/environments")
def environments() -> Response:
    """EnvironmentNames: what a spec may name."""
    return json_answer(EnvironmentNames(environments=registry.names()))


def _opening(result: Result) -> Opening | Failure:
    if isinstance(result, Failure):
        return result
    assert isinstance(result.opening, Opening)
    return result.opening


async def _answer(request: Request, kind: type[T], call: Call[T]) -> Response:
    """Decodes, calls the pool, encodes, and counts, whatever comes of it."""
    metrics: EnvironmentMetrics = request.app.state.environment_metrics
    endpoint = request.url.path
    started_s = time.monotonic()
    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    try:
        response = await _called(request, kind, call)
        status = response.status_code
        return response
    except (Problem, OnbeatError) as error:
        status = int(error.status)
        raise
    finally:
        metrics.requests.labels(endpoint, str(status)).inc()
        metrics.request_seconds.labels(endpoint).observe(time.monotonic() - started_s)


async def _called(request: Request, kind: type[T], call: Call[T]) -> Response:
    body_format = formats.format_of(request)
    try:
        body = await read_body(request, max_bytes=request.app.state.max_body_bytes, cure="send fewer sessions")
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    if len(body) > LARGE_BYTES:
        asked = await run_in_threadpool(formats.decode_request, body, body_format, kind)
    else:
        asked = formats.decode_request(body, body_format, kind)
    answer = await while_connected(request, call(request.app.state.environments, asked))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    encoded = await run_in_threadpool(formats.encode_response, answer, body_format)
    return Response(encoded, media_type=body_format.value)
