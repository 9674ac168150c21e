"""Prometheus metrics of one app, in a registry of its own, so that several apps can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class GatewayMetrics:
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

    def exposition(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self.registry)
