"""The HTTP side of a reward: what the producer's reward_client.py talks to."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Request, Response

from contracts.errors import Unavailable
from contracts.rewards import PluginNames, RewardRequest, RewardResponse
from onbeat.http_service.bodies import json_answer
from onbeat.http_service.problems import Problem
from reward_service.metrics import RewardMetrics
from reward_service.routes.answered import answered
from reward_service.scorers import plugin
from reward_service.scoring import answers

router = APIRouter()


@router.post("/v1/score")
async def score(request: Request) -> Response:
    """RewardRequest → RewardResponse, in the encoding of the request."""
    metrics: RewardMetrics = request.app.state.metrics

    async def call(asked: RewardRequest) -> RewardResponse:
        try:
            response = await answers.score(asked, request.app.state.scorers)
        except Unavailable as error:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
        metrics.count_results(response.results)
        return response

    def count(status: int, seconds: float) -> None:
        metrics.requests.labels(str(status)).inc()
        metrics.request_seconds.observe(seconds)

    return await answered(request, RewardRequest, call, cure="send fewer items", count=count)


@router.get("/v1/plugins")
def plugins() -> Response:
    """PluginNames: what a rubric may name."""
    return json_answer(PluginNames(entry_points=plugin.installed()))
