"""Prometheus metrics: every request, and each active job's last iteration (`onbeat_job_reward_mean{job="job-1f"}`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from http import HTTPMethod
from pathlib import Path

from msgspec import UNSET
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.stage_monitor import stage_view
from contracts.encoding.names import JOB_ID
from contracts.errors import ContractViolation, NotFound
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
STAGE_GAUGES = {
    "num_free": "Items that wait for a worker of the stage.",
    "num_leased": "Items that a worker of the stage holds.",
    "oldest_age_s": "Since the publication of the oldest batch with such an item.",
    "num_workers": "Live workers of the stage.",
    "rows_made": "Rows that got their columns, over the whole job.",
    "items_failed": "Attempts that were given back with a reason, over the whole job.",
    "items_reclaimed": "Leases that expired and went to another worker, over the whole job.",
}
"""A field of StageState → what the gauge of its name says."""


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
        self.live_stage_workers = Gauge(
            "onbeat_live_stage_workers", "Stage workers with a recent sign of life.", registry=self.registry
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
    folders = {job_id: RunFolder(run_root, job_id) for job_id in _newest_active(jobs)}
    found = {job_id: newest_metrics(folder) for job_id, folder in folders.items()}
    return exposition({job_id: metrics for job_id, metrics in found.items() if metrics is not None})


def stage_gauges(broker: Broker, jobs: JobStore) -> bytes:
    """The stages of the newest active jobs as Prometheus text; b"" where no job has any."""
    registry = CollectorRegistry()
    gauges = {
        name: Gauge(f"onbeat_stage_{name}", meaning, ["job", "stage"], registry=registry)
        for name, meaning in STAGE_GAUGES.items()
    }
    rows = Gauge("onbeat_stage_rows_waiting", "Published rows that lack columns.", ["job"], registry=registry)
    memory = Gauge("onbeat_stage_columns_bytes", "Memory of the columns in Redis.", ["job"], registry=registry)
    found = False
    for job_id in _newest_active(jobs):
        with contextlib.suppress(NotFound, ContractViolation):  # removed meanwhile, or of an older version
            spec = jobs.spec(job_id)
            if not spec.stages:
                continue
            report, found = stage_view(broker, job_id, spec), True
            rows.labels(job_id).set(report.rows_waiting)
            memory.labels(job_id).set(report.columns_bytes)
            for state in report.stages:
                for name, gauge in gauges.items():
                    gauge.labels(job_id, state.stage).set(getattr(state, name) or 0.0)
    return generate_latest(registry) if found else b""


def _newest_active(jobs: JobStore) -> list[str]:
    active = set(jobs.active_jobs())
    return [job_id for job_id in jobs.job_ids() if job_id in active and JOB_ID.fullmatch(job_id)][:MAX_JOBS]


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
    environments = Gauge(
        "onbeat_job_environment_metric",
        "Mean of a metric of the job's environment; none without one.",
        ["job", "metric"],
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
        if of_job.trajectories is not UNSET:
            for name, value in of_job.trajectories.environment.items():
                environments.labels(job_id, name).set(value)
        for lag, num_batches in enumerate(of_job.lag_counts):
            lags.labels(job_id, str(lag)).set(num_batches)
    return generate_latest(registry) if metrics else b""
