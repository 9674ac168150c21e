"""The metrics of a process that is no HTTP service: made and served where a port is set, else not even imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from contracts.settings import StackSettings
from onbeat.process.entry_points import load_entry_point

if TYPE_CHECKING:
    from onbeat.telemetry.metrics import ProcessMetrics

M = TypeVar("M", bound="ProcessMetrics")

GROUP = "onbeat.metrics_servers"
"""A group of entry points: what serves a process's metrics, as `http`."""

WRONG_READS = Counter({"cache": 0, "host": 0, "store": 0})
"""Layer → reads of objects, since the process began, that brought other bytes than their digest names."""


def metrics_of(settings: StackSettings, make: Callable[[Any], M]) -> M | None:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput, as what serves them does.

    make: of the module onbeat/telemetry/metrics.py, which imports Prometheus' library, the process's own kind.
    """
    if not settings.metrics_port:
        return None
    from onbeat.telemetry import metrics as kinds

    serve = load_entry_point(GROUP, "http", field="ONBEAT_METRICS_PORT", where="process")
    metrics = make(kinds)
    for layer in WRONG_READS:
        metrics.wrong_reads.labels(layer).set_function(partial(WRONG_READS.__getitem__, layer))
    serve(settings, metrics.exposition)
    return metrics
