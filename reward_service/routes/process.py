"""Whether the service can work, and what it has counted; and all of its routes."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Request
from prometheus_client import generate_latest

from contracts.errors import OnbeatError
from onbeat.http_service.problems import Problem
from onbeat.http_service.process_routes import process_routes
from reward_service.playing.pool import EnvironmentPool
from reward_service.routes import scores, sessions
from reward_service.scoring import answers
from reward_service.scoring.pool import ScorerPool


async def _require_ready(request: Request) -> None:
    """Raises Problem 503 unless both pools work now: a turn of the scorers', once in a while (Readiness)."""
    environments: EnvironmentPool = request.app.state.environments
    if not environments.is_alive:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the environment pool is not alive")
    try:
        await answers.self_test(request.app.state.scorers)
    except OnbeatError as error:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error


def _exposition(request: Request) -> bytes:
    state = request.app.state
    scorers: ScorerPool = state.scorers
    environments: EnvironmentPool = state.environments
    state.metrics.waiting_items.set(scorers.num_waiting_items())
    state.environment_metrics.sessions.set(environments.num_sessions)
    state.environment_metrics.waiting.set(environments.num_waiting())
    return generate_latest(state.registry)


ROUTERS = (scores.router, sessions.router, process_routes(require_ready=_require_ready, exposition=_exposition))
