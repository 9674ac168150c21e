"""Spans of generators and stage workers between the batches that they publish, on their way to a job's timeline.

    generator, stage worker ─ report_spans ─▶ `spans` of the job ─ take, after a commit ─▶ trainer, its run log

When a batch was sampled and scored stands in the batch itself. These spans come next to it and are lost without harm.
They are bounded in both directions: a trainer that reads nothing leaves MAX_REPORTS, and what a report says is checked,
since one could write of others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from broker.connection.bounds import SAID_BYTES
from broker.connection.client import Broker
from contracts.encoding.wire import MAX_ITERATIONS, decode, encode
from contracts.errors import ContractViolation
from contracts.events import TimelineSpan
from contracts.timeline import is_reported

MAX_REPORTS = 256
"""Entries of the stream: the newest."""
MAX_SPANS = 64
"""Spans of one report."""
MAX_NAME_CHARS = 256
FIELD = b"spans"

log = logging.getLogger(__name__)


def report_spans(broker: Broker, job_id: str, spans: Sequence[TimelineSpan]) -> None:
    """Adds up to MAX_SPANS spans, the newest of those that are given; none where they are too large, or the job was
    removed."""
    report = encode(tuple(spans[-MAX_SPANS:]))
    if spans and len(report) <= SAID_BYTES:
        broker.run("report_spans", report, job=job_id, max_reports=MAX_REPORTS)


class SpanStream:
    """The spans that generators and stage workers reported of one job, as its trainer reads them."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._job_id = job_id
        self._key = broker.job_keys(job_id).spans
        self._is_said = False

    def take(self) -> list[TimelineSpan]:
        """Returns the spans that were reported since the last call, without implausible ones, and removes them."""
        with self._broker.call():
            entries: Any = self._broker.redis.xrange(self._key, count=MAX_REPORTS)
        if not entries:
            return []
        milliseconds, number = map(int, entries[-1][0].split(b"-"))
        # An id is MS-NUMBER: the next number is the first id that stays.
        self._broker.write("XTRIM", "spans", "MINID", f"{milliseconds}-{number + 1}", job=self._job_id)
        spans = [span for _, fields in entries for span in self._spans(fields.get(FIELD, b""))]
        return [span for span in spans if is_plausible(span)]

    def _spans(self, packed: bytes) -> tuple[TimelineSpan, ...]:
        if len(packed) <= SAID_BYTES:
            try:
                return decode(packed, tuple[TimelineSpan, ...])[:MAX_SPANS]
            except ContractViolation as error:
                problem = str(error)
        else:
            problem = f"{len(packed)} bytes"
        if not self._is_said:
            self._is_said = True
            log.warning("a report of spans can't be stored, and later ones like it won't be either: %s", problem)
        return ()


def is_plausible(span: TimelineSpan) -> bool:
    """Returns True where a worker may say this of itself: a span of its own kind, with usual names and real times."""
    names = (span.who, span.what, span.batch_id)
    return (
        is_reported(span)
        and all(len(name) <= MAX_NAME_CHARS for name in names)
        and 0 <= span.iteration <= MAX_ITERATIONS
        and math.isfinite(span.started_s)
        and math.isfinite(span.ended_s)
        and 0.0 < span.started_s <= span.ended_s
    )
