"""The endpoints: what onbeat/scoring/reward_client.py and onbeat/environments/client.py talk to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from contracts.environments import service
from contracts.errors import Unavailable
from contracts.rewards import RewardRequest, RewardResponse
from onbeat.http_service.bodies import json_answer
from onbeat.http_service.problems import Problem
from reward_service.answered import answered
from reward_service.metrics import EnvironmentMetrics, RewardMetrics
from reward_service.player import registry
from reward_service.playing.pool import EnvironmentPool
from reward_service.scoring.pool import score

T = TypeVar("T")
Call = Callable[[EnvironmentPool, T], Awaitable[object]]

router = APIRouter()


@router.post("/v1/score")
async def scores(request: Request) -> Response:
    """RewardRequest → RewardResponse, in the encoding of the request."""
    metrics: RewardMetrics = request.app.state.metrics

    async def call(asked: RewardRequest) -> RewardResponse:
        try:
            response = await score(asked, request.app.state.scorers)
        except Unavailable as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        metrics.count_results(response.results)
        return response

    def count(status: int, seconds: float) -> None:
        metrics.requests.labels(str(status)).inc()
        metrics.request_seconds.observe(seconds)

    return await answered(request, RewardRequest, call, cure="send fewer items", count=count)


def _endpoint(path: str, kind: type[T]) -> Callable[[Call[T]], Call[T]]:
    """Serves a call of the pool; it is counted, whatever comes of it."""

    def serves(call: Call[T]) -> Call[T]:
        @router.post(path)
        async def endpoint(request: Request) -> Response:
            metrics: EnvironmentMetrics = request.app.state.environment_metrics

            def count(status: int, seconds: float) -> None:
                metrics.requests.labels(path, str(status)).inc()
                metrics.request_seconds.labels(path).observe(seconds)

            pool: EnvironmentPool = request.app.state.environments
            return await answered(
                request, kind, lambda asked: call(pool, asked), cure="send fewer sessions", count=count
            )

        return call

    return serves


@_endpoint("/v1/openings", service.OpeningRequest)
async def openings(pool: EnvironmentPool, asked: service.OpeningRequest) -> service.OpeningResponse:
    return service.OpeningResponse(openings=tuple(map(_opening, await pool.openings(asked))))


@_endpoint("/v1/sessions", service.OpenRequest)
async def sessions(pool: EnvironmentPool, asked: service.OpenRequest) -> service.SessionResponse:
    return service.SessionResponse(results=tuple(await pool.open(asked)))


@_endpoint("/v1/steps", service.StepRequest)
async def steps(pool: EnvironmentPool, asked: service.StepRequest) -> service.SessionResponse:
    return service.SessionResponse(results=tuple(await pool.step(asked.steps)))


@_endpoint("/v1/sessions/renew", service.RenewRequest)
async def renew(pool: EnvironmentPool, asked: service.RenewRequest) -> service.RenewResponse:
    return service.RenewResponse(num_open=pool.renew(asked.session_ids))


@_endpoint("/v1/sessions/close", service.CloseRequest)
async def close(pool: EnvironmentPool, asked: service.CloseRequest) -> service.CloseResponse:
    return service.CloseResponse(num_closed=pool.close(asked.session_ids))


@_endpoint("/v1/environments/check", service.EnvironmentTable)
async def check(pool: EnvironmentPool, asked: service.EnvironmentTable) -> object:
    """Problem 422 names the field, 503 says why none can be loaded now."""
    loaded = await pool.facts(asked)
    if loaded.failure is not None and loaded.field:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, loaded.failure.detail, field=loaded.field)
    if loaded.facts is None:
        raise Unavailable(loaded.failure.detail if loaded.failure else "it was not loaded")
    return loaded.facts


@_endpoint("/v1/environments/canary", service.CanaryRequest)
async def canary(pool: EnvironmentPool, asked: service.CanaryRequest) -> service.CanaryResponse:
    return service.CanaryResponse(problem=await pool.canary(asked))


@router.get("/v1/environments")
def environments() -> Response:
    """EnvironmentNames: what a spec may name."""
    return json_answer(service.EnvironmentNames(environments=registry.names()))


def _opening(result: service.Result) -> service.TaskOpening | service.Failure:
    if isinstance(result, service.Failure):
        return result
    assert isinstance(result.opening, service.TaskOpening)
    return result.opening
