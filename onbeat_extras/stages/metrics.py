"""What a stage worker counts, for Prometheus, which a worker without ONBEAT_METRICS_PORT doesn't import."""

from __future__ import annotations

from prometheus_client import Counter

from onbeat.telemetry.metrics import ProcessMetrics


class StageMetrics(ProcessMetrics):
    def __init__(self) -> None:
        super().__init__([("compute", "onbeat_stage_worker_item_seconds", "Items, from their claim to their end.")])
        self.items = Counter(
            "onbeat_stage_worker_items", "Items by their end: put, failed or lost.", ["outcome"], registry=self.registry
        )
