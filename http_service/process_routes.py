"""What every service says about its own process: whether it answers, whether it can work, and what it has counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from http_service.bodies import JSON, json_answer

STATE: dict[str, Any] = {"type": "object", "properties": {"status": {"type": "string"}}}
STATES: dict[int | str, dict[str, Any]] = {200: {"description": "", "content": {JSON: {"schema": STATE}}}}
TEXT = CONTENT_TYPE_LATEST.partition(";")[0]
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format", "content": {TEXT: {"schema": {"type": "string"}}}}
}


def process_routes(
    *, require_ready: Callable[[Request], Awaitable[None]], exposition: Callable[[Request], bytes]
) -> APIRouter:
    """require_ready: raises a Problem or an OnbeatError. exposition: Prometheus text; it runs in the thread pool."""
    router = APIRouter(tags=["process"])

    @router.get("/healthz", responses=STATES)
    async def healthz() -> Response:
        """The process answers."""
        return json_answer({"status": "ok"})

    @router.get("/readyz", responses=STATES)
    async def readyz(request: Request) -> Response:
        """The service can do its work now; 503 says why not."""
        await require_ready(request)
        return json_answer({"status": "ready"})

    @router.get("/metrics", response_class=Response, responses=METRICS)
    async def prometheus(request: Request) -> Response:
        """Prometheus text format."""
        return Response(await run_in_threadpool(exposition, request), media_type=CONTENT_TYPE_LATEST)

    return router
