"""What became of each batch, as traces for a collector, where the stack names one: ONBEAT_OTLP_ENDPOINT.

Off, and nothing imported, without it. What sends them is an extra, found among the entry points of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from contracts.errors import InvalidInput
from contracts.events import TimelineSpan
from contracts.settings import StackSettings
from onbeat.process.entry_points import find_entry_point

GROUP = "onbeat.tracing"
NAME = "otlp"
SETTING = "ONBEAT_OTLP_ENDPOINT"


class TraceExport(Protocol):
    """Made of the endpoint's URL; ImportError says that its library isn't installed."""

    def export(self, job_id: str, spans: Sequence[TimelineSpan]) -> None:
        """Queues a committed iteration; returns at once."""
        ...

    def close(self) -> None:
        """Sends what is queued; returns after some seconds also where the collector is away."""
        ...


def trace_export(settings: StackSettings) -> TraceExport | None:
    """None without an endpoint. Raises InvalidInput where the extra isn't installed, or the endpoint is no URL."""
    endpoint = settings.otlp_endpoint
    if not endpoint:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidInput(f"`{endpoint}` is no URL", field=SETTING, cure="http://HOST:4318")
    export = find_entry_point(GROUP, NAME, field=SETTING, where="trainer")
    try:
        return export.load()(endpoint.rstrip("/"))
    except ImportError as error:
        raise InvalidInput("needs OpenTelemetry", field=SETTING, cure='pip install "onbeat[otel]"') from error
