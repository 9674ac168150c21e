"""The routes by which every service reports on its own process: `/healthz`, `/readyz` and `/metrics`.

`/readyz` needs no key, so it costs the service no more than one check in a while, however often it is asked:
the answer of the last check is given again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from onbeat.base.http.bodies import JSON, json_answer

STATE: dict[str, Any] = {"type": "object", "properties": {"status": {"type": "string"}}}
STATES: dict[int | str, dict[str, Any]] = {200: {"description": "", "content": {JSON: {"schema": STATE}}}}
TEXT = CONTENT_TYPE_LATEST.partition(";")[0]
METRICS: dict[int | str, dict[str, Any]] = {
    200: {"description": "Prometheus text format", "content": {TEXT: {"schema": {"type": "string"}}}}
}


READY_S = 5.0
"""How long an answer stands that the service is ready."""
NOT_READY_S = 0.5
"""The same of one that it is not: a start of the stack waits for the change."""


class Readiness:
    """The last check of one app's readiness, and the one that is under way. `/readyz` creates and reads it."""

    def __init__(self, check: Callable[[], Awaitable[None]], *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins without a check.

        Args:
            check: Raises the error that each client is then answered with.
            clock: Seconds, monotonic.
        """
        self._check = check
        self._clock = clock
        self._until_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def require(self) -> None:
        """Raises what the last check did."""
        if self._task is None or self._is_over(self._task):
            self._task = asyncio.create_task(self._look())
            # A client that goes ends no check that others wait for, and its failure is told to them.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._task)

    def _is_over(self, task: asyncio.Task[None]) -> bool:
        if task.done():
            return self._clock() >= self._until_s
        return task.get_loop() is not asyncio.get_running_loop()

    async def _look(self) -> None:
        lasts_s = NOT_READY_S
        try:
            await self._check()
            lasts_s = READY_S
        finally:
            self._until_s = self._clock() + lasts_s


def process_routes(
    *, require_ready: Callable[[Request], Awaitable[None]], exposition: Callable[[Request], bytes]
) -> APIRouter:
    """Makes the routes HEALTH_PATH, `/readyz` and METRICS_PATH.

    Args:
        require_ready: Raises a Problem or an OnbeatError where the service can't work.
        exposition: Returns Prometheus text; it runs in the thread pool.
    """
    router = APIRouter(tags=["process"])

    @router.get("/healthz", responses=STATES)
    async def healthz() -> Response:
        """Answers 200: the process lives."""
        return json_answer({"status": "ok"})

    @router.get("/readyz", responses=STATES)
    async def readyz(request: Request) -> Response:
        """Answers 200 where the service can do its work now, and 503 with the reason where it can't."""
        state = request.app.state
        if not hasattr(state, "readiness"):
            state.readiness = Readiness(lambda: require_ready(request))
        await state.readiness.require()
        return json_answer({"status": "ready"})

    @router.get("/metrics", response_class=Response, responses=METRICS)
    async def prometheus(request: Request) -> Response:
        """Prometheus text format."""
        return Response(await run_in_threadpool(exposition, request), media_type=CONTENT_TYPE_LATEST)

    return router
