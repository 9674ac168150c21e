"""What the lines of a log are about: job, iteration, batch and attempt, and one id that all of a batch's lines share.

    claim ─▶ about_batch(…) ─▶ every line of that task or thread ─▶ facts of the JSON form
                 └─ traceparent ─▶ reward service ─▶ about_request ─▶ their lines

The id is made of the job's and the batch's names alone, so each process knows it and no message carries it; over HTTP
it goes as the trace id of a W3C `traceparent` header (https://www.w3.org/TR/trace-context/), which tracers know.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from contracts.errors import InvalidInput
from contracts.events import TimelineSpan
from contracts.settings import StackSettings
from onbeat.base.process.entry_points import find_entry_point

HEADER = "traceparent"
FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
"""The only version that there is; ids of zeros alone are none."""
ROOT = "root"
"""Name of the span that holds all others of its trace."""
NO_FACTS: Mapping[str, object] = {}

_facts: ContextVar[Mapping[str, object]] = ContextVar("facts", default=NO_FACTS)


def current_facts() -> Mapping[str, object]:
    """What the lines of this task or thread are about."""
    return _facts.get()


@contextmanager
def about(**facts: object) -> Iterator[None]:
    """Adds facts to each line of this task or thread until the end."""
    token = _facts.set({**_facts.get(), **facts})
    try:
        yield
    finally:
        _facts.reset(token)


@contextmanager
def about_batch(job_id: str, *, iteration: int, batch_id: str, attempt: int) -> Iterator[None]:
    """The lines are about one attempt at a batch."""
    trace_id = trace_id_of(job_id, batch_id)
    with about(job=job_id, iteration=iteration, batch_id=batch_id, attempt=attempt, trace_id=trace_id):
        yield


@contextmanager
def about_request(traceparent: str) -> Iterator[None]:
    """The lines are about a request with this header; one of another form adds nothing."""
    found = FORM.fullmatch(traceparent)
    if found is None:
        yield
        return
    with about(trace_id=found[1]):
        yield


def trace_headers() -> dict[str, str]:
    """What a request to another process carries; {} where the lines are about no batch."""
    trace_id = _facts.get().get("trace_id")
    if trace_id is None:
        return {}
    return {HEADER: f"00-{trace_id}-{span_id_of(str(trace_id), ROOT)}-01"}


def trace_id_of(job_id: str, what: str) -> str:
    """32 hexadecimal digits for a batch, or an iteration, of a job."""
    return _digest(f"{job_id}/{what}", 16)


def span_id_of(trace_id: str, name: str) -> str:
    """16 hexadecimal digits for a piece of a trace."""
    return _digest(f"{trace_id}/{name}", 8)


def _digest(name: str, num_bytes: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=num_bytes).hexdigest()


GROUP = "onbeat.tracing"
NAME = "otlp"
SETTING = "ONBEAT_OTLP_ENDPOINT"


class TraceExport(Protocol):
    """Sends traces to a collector, an extra. Made of an endpoint's URL; ImportError: its library isn't installed."""

    def export(self, job_id: str, spans: Sequence[TimelineSpan]) -> None:
        """Queues a committed iteration; returns at once."""
        ...

    def close(self) -> None:
        """Sends what is queued; returns after some seconds also where the collector is away."""
        ...


def trace_export(settings: StackSettings) -> TraceExport | None:
    """None, and nothing imported, without an endpoint. Raises InvalidInput: no such extra, or that is no URL."""
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
