"""The wiring of the reward service.

POST ─ onbeat/base/http/access.py (Host, origin, key)
   └─ endpoints.py
        ├─▶ RewardRequest ─ scoring/pool.py ─┬─ linear-time rubric ─▶ scorers/ in a thread
        │                                    └─ anything else ─▶ threads ═ caged scorer process
        │       one Scored or Unscorable per item, in order ◀──────────┘
        └─▶ OpenRequest, StepRequest ─▶ playing/pool.py ─▶ threads ═ caged children: player/player.py ─ environments
                one Turned or Failure per session, in order ◀─┘
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from starlette.concurrency import run_in_threadpool

from contracts.errors import Unavailable
from contracts.settings import StackSettings
from onbeat.base.http.access import Access, AccessRules
from onbeat.base.http.problems import answer_with_problems
from onbeat.base.http.process_routes import process_routes
from reward_service import endpoints
from reward_service.metrics import EnvironmentMetrics, RewardMetrics
from reward_service.playing.pool import EnvironmentPool
from reward_service.scoring.pool import ScorerPool, self_test

MAX_BODY_BYTES = 64 * 1024 * 1024


def create_app(
    settings: StackSettings, *, num_threads: int | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """Returns an app with its own pools and metrics. `num_threads` None: one scorer process per usable core.

    Raises InvalidInput for settings without a key, and for an operator's part in an environment that can't be read.
    """
    rules = AccessRules.of(settings, key=settings.reward_key, key_setting="ONBEAT_REWARD_KEY", works_for_processes=True)
    app = FastAPI(
        title="Onbeat reward service", docs_url=None, redoc_url=None, openapi_url=None, lifespan=_close_pools_at_the_end
    )
    app.state.registry = CollectorRegistry()
    ProcessCollector(registry=app.state.registry)
    app.state.metrics = RewardMetrics(app.state.registry)
    app.state.environment_metrics = EnvironmentMetrics(app.state.registry)
    app.state.scorers = ScorerPool(
        num_threads=num_threads,
        warm_up_timeout_s=settings.scorer_start_s,
        memory_mb=settings.scorer_memory_mb,
        network=settings.scorer_network == "host",
        hidden=settings.own_folders,
        readable=settings.readable_in_cages,
        on_restart=app.state.metrics.scorer_restarts.inc,
    )
    app.state.environments = EnvironmentPool(
        settings,
        on_restart=app.state.environment_metrics.child_restarts.inc,
        on_result=app.state.environment_metrics.count_result,
    )
    app.state.max_body_bytes = max_body_bytes
    routers = (endpoints.router, process_routes(require_ready=_require_ready, exposition=_exposition))
    for router in routers:
        app.include_router(router)
    answer_with_problems(app, routers, service="the reward service")
    app.add_middleware(Access, rules)
    return app


@asynccontextmanager
async def _close_pools_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    await run_in_threadpool(app.state.scorers.close)
    await run_in_threadpool(app.state.environments.shut)


async def _require_ready(request: Request) -> None:
    """Raises Unavailable unless both pools work now: a turn of the scorers', once in a while (Readiness)."""
    environments: EnvironmentPool = request.app.state.environments
    if not environments.is_alive:
        raise Unavailable("the environment pool is not alive")
    await self_test(request.app.state.scorers)


def _exposition(request: Request) -> bytes:
    state = request.app.state
    scorers: ScorerPool = state.scorers
    environments: EnvironmentPool = state.environments
    state.metrics.waiting_items.set(scorers.num_waiting_items())
    state.environment_metrics.sessions.set(environments.num_sessions)
    state.environment_metrics.waiting.set(environments.num_waiting())
    return generate_latest(state.registry)
