"""The HTTP side of a reward: what the producer's reward_client.py talks to."""

from __future__ import annotations

import time
from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from contracts.errors import OnbeatError, Unavailable
from contracts.rewards import PluginNames, RewardRequest
from onbeat.http_service import formats
from onbeat.http_service.bodies import json_answer, read_body
from onbeat.http_service.connected import CLIENT_GONE, while_connected
from onbeat.http_service.problems import Problem
from reward_service.metrics import RewardMetrics
from reward_service.scorers import plugin
from reward_service.scoring import answers

router = APIRouter()


@router.post("/v1/score")
async def score(request: Request) -> Response:
    """RewardRequest → RewardResponse, in the encoding of the request."""
    metrics: RewardMetrics = request.app.state.metrics
    started_s = time.monotonic()
    status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
    try:
        response = await _answer(request)
        status = response.status_code
        return response
    except (Problem, OnbeatError) as error:
        status = int(error.status)
        raise
    finally:
        metrics.requests.labels(str(status)).inc()
        metrics.request_seconds.observe(time.monotonic() - started_s)


@router.get("/v1/plugins")
def plugins() -> Response:
    """PluginNames: what a rubric may name."""
    return json_answer(PluginNames(entry_points=plugin.installed()))


async def _answer(request: Request) -> Response:
    body_format = formats.format_of(request)
    try:
        body = await read_body(request, max_bytes=request.app.state.max_body_bytes, cure="send fewer items")
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE)
    reward_request = await run_in_threadpool(formats.decode_request, body, body_format, RewardRequest)
    try:
        reward_response = await while_connected(request, answers.score(reward_request, request.app.state.scorers))
    except Unavailable as error:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    if reward_response is None:
        return Response(status_code=CLIENT_GONE)
    metrics: RewardMetrics = request.app.state.metrics
    metrics.count_results(reward_response.results)
    encoded = await run_in_threadpool(formats.encode_response, reward_response, body_format)
    return Response(encoded, media_type=body_format.value)
