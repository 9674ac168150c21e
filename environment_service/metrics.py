"""Prometheus metrics of one app, in a registry of its own, so that several apps can live in one process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contracts.environments.service import Failure, Result

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class EnvironmentMetrics:
    """What the environment service counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "onbeat_environment_requests",
            "Requests by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "onbeat_environment_request_seconds",
            "Wall time of a request, reading and decoding its body included.",
            ["endpoint"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.results = Counter(
            "onbeat_environment_results",
            "Results of sessions by outcome: turned, or the reason why not.",
            ["outcome"],
            registry=self.registry,
        )
        self.child_restarts = Counter(
            "onbeat_environment_child_restarts",
            "Processes of environments that were lost and replaced.",
            registry=self.registry,
        )
        self.sessions = Gauge("onbeat_environment_sessions", "Open sessions.", registry=self.registry)
        self.waiting = Gauge(
            "onbeat_environment_waiting_steps", "Resets and steps that are not played yet.", registry=self.registry
        )
        self._turned = self.results.labels("turned")

    def count_result(self, result: Result) -> None:
        """Called by the pool's threads."""
        if isinstance(result, Failure):
            self.results.labels(result.reason).inc()
        else:
            self._turned.inc()
