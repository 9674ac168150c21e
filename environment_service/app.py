"""The wiring of the environment service.

POST ─ onbeat/http_service/access.py (Host, origin, key)
   └─ onbeat/http_service/formats.py ─▶ a call ─ pool/pool.py ─▶ lanes ═ caged children: player/player.py ─ environments
SessionResponse ◀─ one Turned or Failure per session, in order ◀───────────┘
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from contracts.settings import StackSettings
from environment_service.metrics import EnvironmentMetrics
from environment_service.pool.pool import EnvironmentPool
from environment_service.routes import ROUTERS
from onbeat.http_service.access import Access, AccessRules
from onbeat.http_service.problems import answer_with_problems

MAX_BODY_BYTES = 64 * 1024 * 1024


def create_app(settings: StackSettings, *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """An app with its own pool and metrics. Raises InvalidInput for settings without a key."""
    rules = AccessRules.of(settings, key=settings.environment_key, key_setting="ONBEAT_ENVIRONMENT_KEY")
    metrics = EnvironmentMetrics()
    pool = EnvironmentPool(settings, on_restart=metrics.child_restarts.inc, on_result=metrics.count_result)
    app = FastAPI(
        title="Onbeat environment service",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_shut_pool_at_the_end,
    )
    app.state.metrics = metrics
    app.state.pool = pool
    app.state.max_body_bytes = max_body_bytes
    for router in ROUTERS:
        app.include_router(router)
    answer_with_problems(app, ROUTERS, service="the environment service")
    app.add_middleware(Access, rules)
    return app


@asynccontextmanager
async def _shut_pool_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    await run_in_threadpool(app.state.pool.shut)
