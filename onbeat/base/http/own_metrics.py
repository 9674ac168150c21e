"""What a process counts that is no HTTP service: an extra keeps and serves it where a port is set, else none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from contracts.settings import StackSettings
from onbeat.base.process.entry_points import load_entry_point

GROUP = "onbeat.metrics_servers"
"""A group of entry points: `http` makes and serves a process's OwnMetrics, of its settings and what it is."""

WRONG_READS = Counter({"cache": 0, "host": 0, "store": 0})
"""Layer → reads of objects, since the process began, that brought other bytes than their digest names."""

Process = Literal["generator", "trainer", "stage", "worker", "tasks", "clock"]
"""A worker is a consumer's, which starts trainers; `tasks` is a worker of tasks, and `clock` starts some of them."""


class OwnMetrics:
    """Numbers of a process, by what they are called in its code; as it stands here none is kept."""

    def observe(self, what: str, seconds: float) -> None:
        """Books how long something took; what has no histogram is passed over."""

    def count(self, name: str, number: int = 1, *, label: str = "") -> None:
        """Adds to a counter. label: which of its parts, of one that has some; never what a job or a client wrote."""

    def set(self, name: str, value: float) -> None:
        """Says what a gauge has from now on."""

    def ask(self, name: str, value: Callable[[], float]) -> None:
        """Has a gauge ask what it has, each time that it is read."""


UNCOUNTED = OwnMetrics()


def metrics_of(settings: StackSettings, process: Process) -> OwnMetrics:
    """Serves this process's metrics from now on, where a port is set. Raises InvalidInput, as what serves them does."""
    if not settings.metrics_port:
        return UNCOUNTED
    return load_entry_point(GROUP, "http", field="ONBEAT_METRICS_PORT", where="process")(settings, process)
