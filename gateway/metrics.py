"""Prometheus metrics: every request, and each active job's last iteration (`onbeat_job_reward_mean{job="job-1f"}`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPMethod
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.job_store import JobStore
from contracts.encoding.names import JOB_ID
from contracts.events import IterationMetrics
from contracts.run_folder import RunFolder
from gateway.run_files import newest_metrics

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
UNKNOWN_ROUTE = "unknown"
UNKNOWN_METHOD = "other"
"""A client may invent any number of methods, and each label stays for ever."""
METHODS = frozenset(HTTPMethod)
MAX_JOBS = 50
"""The newest active ones: every job is a new label, and a server keeps labels for ever."""


class GatewayMetrics:
    """The metrics of one app, in a registry of its own, so that several apps can live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
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
        self.active_jobs = Gauge("onbeat_active_jobs", "Jobs that are not final.", registry=self.registry)
        self.live_generators = Gauge(
            "onbeat_live_generators", "Generators with a recent sign of life.", registry=self.registry
        )


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
            method = scope["method"] if scope["method"] in METHODS else UNKNOWN_METHOD
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


def job_gauges(jobs: JobStore, run_root: Path) -> bytes:
    """Prometheus text format; b"" where no active job has trained an iteration yet."""
    active = set(jobs.active_jobs())
    newest = [job_id for job_id in jobs.job_ids() if job_id in active and JOB_ID.fullmatch(job_id)][:MAX_JOBS]
    folders = {job_id: RunFolder(run_root, job_id) for job_id in newest}
    found = {job_id: newest_metrics(folder) for job_id, folder in folders.items()}
    return exposition({job_id: metrics for job_id, metrics in found.items() if metrics is not None})


def exposition(metrics: Mapping[str, IterationMetrics]) -> bytes:
    """Job id → its last iteration, as text. Each call makes a registry: a job that ended leaves no gauge behind."""
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    components = Gauge(
        "onbeat_job_reward_component", "Mean score of a reward component.", ["job", "component"], registry=registry
    )
    lags = Gauge(
        "onbeat_job_lag_batches",
        "Training batches that each lag had; none without one.",
        ["job", "lag"],
        registry=registry,
    )
    for job_id, of_job in metrics.items():
        for name, value in {"iteration": float(of_job.iteration), **of_job.numbers()}.items():
            if name not in gauges:
                meaning = f"{name} of the job's last trained iteration (docs/metrics.md)."
                gauges[name] = Gauge(f"onbeat_job_{name}", meaning, ["job"], registry=registry)
            gauges[name].labels(job_id).set(value)
        for name, value in of_job.reward_components.items():
            components.labels(job_id, name).set(value)
        for lag, num_batches in enumerate(of_job.lag_counts):
            lags.labels(job_id, str(lag)).set(num_batches)
    return generate_latest(registry) if metrics else b""
