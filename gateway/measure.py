"""Counts every request, whoever answers it, by labels of which there are few."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from http import HTTPMethod
from typing import Any

from gateway.metrics import GatewayMetrics
from http_service.access import App, Receive, Scope, Send

UNKNOWN_ROUTE = "unknown"
UNKNOWN_METHOD = "other"
"""A client may invent any number of methods, and each label stays for ever."""
METHODS = frozenset(HTTPMethod)


class Measure:
    """ASGI. A request is counted with the head of its answer: an event stream goes on for hours.

    By route template: a path with a job id in it would make a metric for each job.
    """

    def __init__(self, app: App, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s = time.monotonic()
        is_counted = False

        def count(status: int) -> None:
            nonlocal is_counted
            is_counted = True
            route = getattr(scope.get("route"), "path", UNKNOWN_ROUTE)
            method = scope["method"] if scope["method"] in METHODS else UNKNOWN_METHOD
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started_s)

        async def send_counted(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            if not is_counted:
                count(500)  # a defect, which is answered further out, or a request that was given up
