"""Prometheus metrics of one app, in a registry of its own, so that several apps can live in one process."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from contracts.rewards import Scored, Unscorable

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RewardMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "onbeat_reward_requests", "Scoring requests by HTTP status.", ["status"], registry=self.registry
        )
        self.items = Counter(
            "onbeat_reward_items",
            "Items by outcome: scored, or the reason why not.",
            ["outcome"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "onbeat_reward_request_seconds",
            "Wall time of a scoring request, reading and decoding its body included.",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.scorer_restarts = Counter(
            "onbeat_reward_worker_restarts",
            "Scorer processes that were lost and replaced.",
            registry=self.registry,
        )
        self.waiting_items = Gauge(
            "onbeat_reward_waiting_items", "Items that no scorer process has begun.", registry=self.registry
        )

    def count_results(self, results: tuple[Scored | Unscorable, ...]) -> None:
        outcomes = Tally(result.reason if isinstance(result, Unscorable) else "scored" for result in results)
        for outcome, num_items in outcomes.items():
            self.items.labels(outcome).inc(num_items)
