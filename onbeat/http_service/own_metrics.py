"""The metrics of a process that is no HTTP service: made and served where a port is set, else not even imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from contracts.settings import StackSettings

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import ProcessMetrics

M = TypeVar("M", bound="ProcessMetrics")

WRONG_READS = Counter({"cache": 0, "host": 0, "store": 0})
"""Layer → reads of objects, since the process began, that brought other bytes than their digest names."""


def metrics_of(settings: StackSettings, make: Callable[[Any], M]) -> M | None:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput, as `serve_metrics`.

    make: of the module onbeat/telemetry/metrics.py, which imports Prometheus' library, the process's own kind.
    """
    if not settings.metrics_port:
        return None
    from onbeat.http_service.metrics_server import serve_metrics
    from onbeat.telemetry import metrics as kinds

    metrics = make(kinds)
    for layer in WRONG_READS:
        metrics.wrong_reads.labels(layer).set_function(partial(WRONG_READS.__getitem__, layer))
    serve_metrics(settings, metrics.exposition)
    return metrics
