"""Prometheus metrics of one app, in a registry of its own, so that several apps can live in one process."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contracts.environments.service import Failure, Result
from contracts.rewards import Scored, Unscorable

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RewardMetrics:
    """The numbers of scoring that the service counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "onbeat_reward_requests", "Scoring requests by HTTP status.", ["status"], registry=registry
        )
        self.items = Counter(
            "onbeat_reward_items", "Items by outcome: scored, or the reason why not.", ["outcome"], registry=registry
        )
        self.request_seconds = Histogram(
            "onbeat_reward_request_seconds",
            "Wall time of a scoring request, reading and decoding its body included.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.scorer_restarts = Counter(
            "onbeat_reward_worker_restarts", "Scorer processes that were lost and replaced.", registry=registry
        )
        self.waiting_items = Gauge(
            "onbeat_reward_waiting_items", "Items that no scorer process has begun.", registry=registry
        )

    def count_results(self, results: tuple[Scored | Unscorable, ...]) -> None:
        outcomes = Tally(result.reason if isinstance(result, Unscorable) else "scored" for result in results)
        for outcome, num_items in outcomes.items():
            self.items.labels(outcome).inc(num_items)


class EnvironmentMetrics:
    """The numbers of playing that the service counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "onbeat_environment_requests",
            "Requests by endpoint and HTTP status.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "onbeat_environment_request_seconds",
            "Wall time of a request, reading and decoding its body included.",
            ["endpoint"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.results = Counter(
            "onbeat_environment_results",
            "Results of sessions by outcome: turned, or the reason why not.",
            ["outcome"],
            registry=registry,
        )
        self.child_restarts = Counter(
            "onbeat_environment_child_restarts",
            "Processes of environments that were lost and replaced.",
            registry=registry,
        )
        self.sessions = Gauge("onbeat_environment_sessions", "Open sessions.", registry=registry)
        self.waiting = Gauge(
            "onbeat_environment_waiting_steps", "Resets and steps that are not played yet.", registry=registry
        )
        self.results.labels("turned")

    def count_result(self, result: Result) -> None:
        """Called by the pool's threads."""
        self.results.labels(result.reason if isinstance(result, Failure) else "turned").inc()
