"""Prometheus metrics of the gateway itself: every request, by the template of its route."""

from __future__ import annotations

import time
from http import HTTPMethod

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
UNKNOWN_ROUTE = "unknown"
UNKNOWN_METHOD = "other"
"""A client may invent any number of methods, and each label stays for ever."""
METHODS = frozenset(HTTPMethod)


class GatewayMetrics:
    """The metrics of one app, in a registry of its own, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "onbeat_gateway_requests",
            "Requests by method, route and HTTP status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "onbeat_gateway_request_seconds",
            "Time to the head of the answer, by route.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.event_streams = Gauge("onbeat_gateway_event_streams", "Open event streams.", registry=self.registry)
        self.jobs_created = Counter("onbeat_gateway_jobs_created", "New jobs.", registry=self.registry)


class Measure:
    """ASGI: counts each request with the head of its answer, since an event stream goes on for hours.

    The label is the route's template: a path with a job id in it would make a metric for each job.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
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
            method = UNKNOWN_METHOD
            if scope["method"] in METHODS:
                method = scope["method"]
            self._metrics.requests.labels(method, route, str(status)).inc()
            self._metrics.request_seconds.labels(route).observe(time.monotonic() - started_s)

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            if not is_counted:
                count(500)  # a defect, which is answered further out, or a request that was given up
