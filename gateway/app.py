"""The wiring of the gateway.

request ─ access.py (bearer key) ─ routes.py ─┬─ submission.py ─▶ job store ─▶ Celery: `onbeat.ensure_trainer`
                                              ├─ event_stream.py ◀─ the job's events
                                              ├─ run_files.py ◀─ the job's run folder
                                              └─ broker/monitor.py ◀─ fence, counters, streams
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from gateway.access import require_configured_key
from gateway.openapi import describe_contracts
from gateway.problems import answer_with_problems
from gateway.routes import jobs_api, process_api
from gateway.services import Services

VERSION = "0.1.0"
UNKNOWN_ROUTE = "unknown"


def create_app(services: Services) -> FastAPI:
    """An app over the given collaborators, which it closes at its end. Raises InvalidInput without an API key."""
    app = FastAPI(
        title="Onbeat",
        version=VERSION,
        description="On-policy reinforcement learning jobs: submit, watch, cancel, verify.",
        lifespan=_close_at_the_end,
    )
    app.state.api_key = require_configured_key(services.settings)
    app.state.services = services
    app.include_router(jobs_api)
    app.include_router(process_api)
    answer_with_problems(app)
    describe_contracts(app)
    app.middleware("http")(_measure)
    return app


@asynccontextmanager
async def _close_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    services: Services = app.state.services
    services.closing.set()
    await run_in_threadpool(services.requests.close)
    services.broker.close()


async def _measure(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Counts by route template: a path with a job id in it would make a metric for each job."""
    services: Services = request.app.state.services
    started_s = time.monotonic()
    status = 500
    try:
        response = await call_next(request)
        status = response.status_code
        return response
    finally:
        route = getattr(request.scope.get("route"), "path", UNKNOWN_ROUTE)
        services.metrics.requests.labels(request.method, route, str(status)).inc()
        services.metrics.request_seconds.labels(route).observe(time.monotonic() - started_s)
