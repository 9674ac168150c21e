"""The endpoints: what onbeat/scoring/reward_client.py and onbeat/environments/client.py talk to.

Raw bytes ↔ records of contracts/, in JSON or MessagePack, answered as asked; what is answered is counted.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from enum import Enum
from http import HTTPStatus
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from contracts.encoding.wire import decode, decode_json, encode, encode_json, invalid_input
from contracts.environments import service
from contracts.errors import ContractViolation, InvalidInput, OnbeatError, Unavailable
from contracts.rewards import RewardPackages, RewardRequest, RewardResponse
from onbeat.base.http.bodies import CLIENT_GONE, json_answer, media_type_of, read_body, while_connected
from onbeat.base.http.problems import Problem
from onbeat.base.process.entry_points import offers_of, package_of
from reward_service.metrics import EnvironmentMetrics, RewardMetrics
from reward_service.player import registry
from reward_service.playing.pool import EnvironmentPool
from reward_service.scorers import plugin
from reward_service.scorers.rubric import types_without_package
from reward_service.scoring.pool import ScorerPool, score

LARGE_BYTES = 256 * 1024
"""A body of this size is decoded beside the event loop."""

T = TypeVar("T")


async def answered(
    request: Request,
    kind: type[T],
    call: Callable[[T], Awaitable[object]],
    *,
    cure: str,
    count: Callable[[int, float], None],
) -> Response:
    """Answers in the encoding of the request. cure: of a body that is too large.

    count: is given the status and the seconds, whatever comes of it.
    """
    started_s = time.monotonic()
    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    try:
        response = await _answered(request, kind, call, cure=cure)
        status = response.status_code
        return response
    except (Problem, OnbeatError) as error:
        status = int(error.status)
        raise
    finally:
        count(status, time.monotonic() - started_s)


async def _answered(request: Request, kind: type[T], call: Callable[[T], Awaitable[object]], *, cure: str) -> Response:
    body_format = format_of(request)
    try:
        body = await read_body(request, max_bytes=request.app.state.max_body_bytes, cure=cure)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    if len(body) > LARGE_BYTES:
        decoded_request = await run_in_threadpool(decode_request, body, body_format, kind)
    else:
        decoded_request = decode_request(body, body_format, kind)
    answer = await while_connected(request, call(decoded_request))
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    encoded = await run_in_threadpool(encode_json if body_format is BodyFormat.JSON else encode, answer)
    return Response(encoded, media_type=body_format.value)


class BodyFormat(Enum):
    JSON = "application/json"
    MSGPACK = "application/msgpack"


FORMATS = {
    "application/json": BodyFormat.JSON,
    "application/msgpack": BodyFormat.MSGPACK,
    "application/x-msgpack": BodyFormat.MSGPACK,
}


def format_of(request: Request) -> BodyFormat:
    """Raises Problem 415."""
    media_type = media_type_of(request)
    body_format = FORMATS.get(media_type)
    if body_format is None:
        raise Problem(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"`{media_type}` is not understood; send one of {', '.join(FORMATS)}",
            field="Content-Type",
        )
    return body_format


def decode_request(body: bytes, body_format: BodyFormat, kind: type[T]) -> T:
    """Raises Problem 400 where the bytes are no document at all, 422 where a field breaks the contract."""
    try:
        if body_format is BodyFormat.JSON:
            return decode_json(body, kind)
        return decode(body, kind)
    except (InvalidInput, ContractViolation) as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise Problem(HTTPStatus.BAD_REQUEST, f"not {body_format.value}: {error.__cause__}") from error
        refusal = invalid_input(error.__cause__, kind)
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, refusal.problem, field=refusal.field) from error


Call = Callable[[EnvironmentPool, T], Awaitable[object]]

router = APIRouter()


@router.post("/v1/score")
async def scores(request: Request) -> Response:
    """RewardRequest → RewardResponse, in the encoding of the request."""
    metrics: RewardMetrics = request.app.state.metrics

    async def call(decoded_request: RewardRequest) -> RewardResponse:
        response = await score(decoded_request, request.app.state.scorers)
        metrics.count_results(response.results)
        return response

    def count(status: int, seconds: float) -> None:
        metrics.requests.labels(str(status)).inc()
        metrics.request_seconds.observe(seconds)

    return await answered(request, RewardRequest, call, cure="send fewer items", count=count)


@router.get("/v1/score/losses")
def losses(request: Request, job_id: Annotated[str, Query(max_length=64)]) -> Response:
    """ScorerLosses of a job, as MessagePack: what takes a request so long that is still in the air."""
    scorers: ScorerPool = request.app.state.scorers
    return Response(encode(scorers.losses(job_id)), media_type=BodyFormat.MSGPACK.value)


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
                request,
                kind,
                lambda decoded_request: call(pool, decoded_request),
                cure="send fewer sessions",
                count=count,
            )

        return call

    return serves


@_endpoint("/v1/initial-observations", service.InitialObservationRequest)
async def observations(
    pool: EnvironmentPool, decoded_request: service.InitialObservationRequest
) -> service.InitialObservationResponse:
    return service.InitialObservationResponse(
        observations=tuple(map(_observation, await pool.observations(decoded_request)))
    )


@_endpoint("/v1/sessions", service.OpenRequest)
async def sessions(pool: EnvironmentPool, decoded_request: service.OpenRequest) -> service.SessionResponse:
    return service.SessionResponse(results=tuple(await pool.open(decoded_request)))


@_endpoint("/v1/steps", service.StepRequest)
async def steps(pool: EnvironmentPool, decoded_request: service.StepRequest) -> service.SessionResponse:
    return service.SessionResponse(results=tuple(await pool.step(decoded_request.steps)))


@_endpoint("/v1/sessions/renew", service.RenewRequest)
async def renew(pool: EnvironmentPool, decoded_request: service.RenewRequest) -> service.RenewResponse:
    return service.RenewResponse(num_open=pool.renew(decoded_request.session_ids))


@_endpoint("/v1/sessions/close", service.CloseRequest)
async def close(pool: EnvironmentPool, decoded_request: service.CloseRequest) -> service.CloseResponse:
    return service.CloseResponse(num_closed=pool.close(decoded_request.session_ids))


@_endpoint("/v1/environments/check", service.EnvironmentTable)
async def check(pool: EnvironmentPool, table: service.EnvironmentTable) -> object:
    """Checks an environment by loading it. Problem 422 names the field, 503 says why none can be loaded now."""
    loaded = await pool.facts(table)
    if loaded.failure is not None and loaded.field:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, loaded.failure.detail, field=loaded.field)
    if loaded.facts is None:
        raise Unavailable(loaded.failure.detail if loaded.failure else "it was not loaded")
    return loaded.facts


@_endpoint("/v1/environments/repeatability", service.RepeatabilityRequest)
async def repeatability(
    pool: EnvironmentPool, decoded_request: service.RepeatabilityRequest
) -> service.RepeatabilityResponse:
    return service.RepeatabilityResponse(problem=await pool.repeatability(decoded_request))


@router.get("/v1/rewards")
def rewards() -> Response:
    """RewardPackages: the functions that a spec may name, and whose they are; imports none of them."""
    offers = offers_of(plugin.GROUP)
    packages = {name: package_of(offer) for name, offer in offers.items()}
    return json_answer(RewardPackages(packages=packages, lacks=types_without_package() or UNSET))


@router.get("/v1/environments")
def environments() -> Response:
    """Answers EnvironmentNames: the environments that a spec may name."""
    return json_answer(service.EnvironmentNames(environments=registry.environment_names()))


def _observation(result: service.Result) -> service.InitialObservation | service.Failure:
    if isinstance(result, service.Failure):
        return result
    assert isinstance(result.observation, service.InitialObservation)
    return result.observation
