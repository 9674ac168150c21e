"""Log lines name their job, iteration, batch and attempt, and all lines about a batch share one trace id.

    claim ─▶ about_batch(…) ─▶ every line of that task or thread ─▶ fields of the JSON form
                 └─ traceparent ─▶ reward service ─▶ about_request ─▶ their lines

The id is a digest of the job's and the batch's names, so each process computes it and no message between our processes
carries it. A request to the reward service carries it as the trace id of a W3C `traceparent` header
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

HEADER = "traceparent"
FORM = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}")
"""Version 00 of the header, the only one. An id of zeros alone is invalid."""
ROOT = "root"
"""The name whose digest is the parent id of the header: the batch as a whole."""
NO_FACTS: Mapping[str, object] = {}

_facts: ContextVar[Mapping[str, object]] = ContextVar("facts", default=NO_FACTS)


def current_facts() -> Mapping[str, object]:
    """Returns the facts that each log line of this task or thread carries."""
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
    """Adds the facts of one attempt at a batch to each line of this task or thread until the end."""
    trace_id = trace_id_of(job_id, batch_id)
    with about(job=job_id, iteration=iteration, batch_id=batch_id, attempt=attempt, trace_id=trace_id):
        yield


@contextmanager
def about_request(traceparent: str) -> Iterator[None]:
    """Adds the trace id of a request's header to each line until the end; a header of another form adds nothing."""
    match = FORM.fullmatch(traceparent)
    if match is None:
        yield
        return
    with about(trace_id=match[1]):
        yield


def trace_headers() -> dict[str, str]:
    """Returns the headers that a request to another process carries; {} outside `about_batch`."""
    trace_id = _facts.get().get("trace_id")
    if trace_id is None:
        return {}
    return {HEADER: f"00-{trace_id}-{span_id_of(str(trace_id), ROOT)}-01"}


def trace_id_of(job_id: str, batch_id: str) -> str:
    """Returns the trace id of a batch: 32 hexadecimal digits."""
    return _digest(f"{job_id}/{batch_id}", 16)


def span_id_of(trace_id: str, name: str) -> str:
    """Returns the id of a part of a trace: 16 hexadecimal digits."""
    return _digest(f"{trace_id}/{name}", 8)


def _digest(name: str, num_bytes: int) -> str:
    return hashlib.blake2b(name.encode(), digest_size=num_bytes).hexdigest()
