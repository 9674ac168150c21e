"""What generators did between the batches that they publish, and stage workers, on its way to a job's timeline.

    generator, stage worker ─ report: one XADD ─▶ onbeat:{J}:spans ─ take, after a commit ─▶ trainer, its run log

When a batch was sampled and scored stands in the batch itself. What is here is told beside it and is lost without harm.
It is bounded in both directions: a trainer that reads nothing leaves MAX_REPORTS, and what a report says is checked,
since one could write of others. Any of them may add an entry with the last id that a stream can have: then nothing
can be told here any more, and no process may end of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from broker.connection.client import Broker
from broker.keys import JobKeys
from contracts.encoding.wire import MAX_ITERATIONS, decode, encode
from contracts.errors import ContractViolation, FenceViolation
from contracts.events import TimelineSpan
from contracts.timeline import is_reported

MAX_REPORTS = 256
"""Entries of the stream: the newest."""
MAX_SPANS = 64
"""Spans of one report."""
MAX_REPORT_BYTES = 64 * 1024
MAX_NAME_CHARS = 256
FIELD = b"spans"
LAST_PART = 2**64 - 1
"""The largest that each of the two parts of an entry's id may be."""

log = logging.getLogger(__name__)


class SpanStream:
    """The spans that generators and stage workers report of one job."""

    def __init__(self, broker: Broker, job_id: str) -> None:
        self._broker = broker
        self._keys = JobKeys(job_id)
        self._is_said = False

    def report(self, spans: Sequence[TimelineSpan]) -> None:
        """Adds up to MAX_SPANS spans, the newest of those that are given; nothing where the job was removed, or the
        server refuses them."""
        if spans:
            packed = encode(tuple(spans[-MAX_SPANS:]))
            try:
                self._broker.write(
                    "XADD", self._keys.spans, "MAXLEN", MAX_REPORTS, "*", FIELD, packed, job=self._keys
                )  # fmt: skip
            except FenceViolation as error:
                self._say("spans for the timeline can't be told", str(error))

    def take(self) -> list[TimelineSpan]:
        """Returns what was reported since the last call, and removes it; without what none may say."""
        with self._broker.call():
            entries: Any = self._broker.redis.xrange(self._keys.spans, count=MAX_REPORTS)
        if not entries:
            return []
        following = id_after(entries[-1][0].decode())
        rest = ("MINID", following) if following else ("MAXLEN", "0")
        self._broker.write("XTRIM", self._keys.spans, *rest, job=self._keys)
        found = [span for _, fields in entries for span in self._spans(fields.get(FIELD, b""))]
        return [span for span in found if is_plausible(span)]

    def _spans(self, packed: bytes) -> tuple[TimelineSpan, ...]:
        if len(packed) <= MAX_REPORT_BYTES:
            try:
                return decode(packed, tuple[TimelineSpan, ...])[:MAX_SPANS]
            except ContractViolation as error:
                problem = str(error)
        else:
            problem = f"{len(packed)} bytes"
        self._say("a report of spans is left out, and others like it will be", problem)
        return ()

    def _say(self, what: str, problem: str) -> None:
        if not self._is_said:
            self._is_said = True
            log.warning("%s: %s", what, problem)


def id_after(entry_id: str) -> str:
    """The smallest id above that of an entry; "" above the last one that there is."""
    milliseconds, number = map(int, entry_id.split("-"))
    if number < LAST_PART:
        return f"{milliseconds}-{number + 1}"
    return f"{milliseconds + 1}-0" if milliseconds < LAST_PART else ""


def is_plausible(span: TimelineSpan) -> bool:
    """Whether a generator or a stage worker may say this of itself: its own kind, usual names, real times."""
    names = (span.who, span.what, span.batch_id)
    return (
        is_reported(span)
        and all(len(name) <= MAX_NAME_CHARS for name in names)
        and 0 <= span.iteration <= MAX_ITERATIONS
        and math.isfinite(span.started_s)
        and math.isfinite(span.ended_s)
        and 0.0 < span.started_s <= span.ended_s
    )
