"""What changes while a client looks, as server-sent events: whole records, each sent when it differs from the last.

Consumes:     one look at the broker a period, in a thread so that the event loop never blocks.
Waits for:    a look that differs; a comment goes out when nothing else did for KEEP_ALIVE_S.
Unblocked by: a client that left, a gateway that ends, a job that is gone, a broker that stays away.
Produces:     `event` and `data` fields. There are no ids: a client that comes back gets the present whole.

While the broker doesn't answer, its problem is sent as an event `problem`, once; the next record takes it back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi.sse import format_sse_event

from contracts.answers import problem_body
from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError, Unavailable
from gateway.event_stream import LookStream

PERIOD_S = 1.0
PROBLEM = "problem"

log = logging.getLogger(__name__)

Look = Callable[[], dict[str, object]]
"""Reads the present: event name → record. It blocks; raises OnbeatError."""


@dataclass(kw_only=True)
class LiveStream(LookStream):
    """One client's stream."""

    records: Look
    _sent: dict[str, bytes] = field(default_factory=dict)

    def look(self) -> tuple[list[bytes], float | None]:
        return self._changed({name: encode_json(record) for name, record in self.records().items()}), self.period_s

    def told(self, error: OnbeatError) -> list[bytes]:
        return self._changed({PROBLEM: problem_body(error.status, error.problem, field=error.field, cure=error.cure)})

    def _changed(self, seen: dict[str, bytes]) -> list[bytes]:
        """After a problem all is sent again, so that the client knows it is over."""
        if PROBLEM in self._sent and PROBLEM not in seen:
            self._sent.clear()
        changed = {name: data for name, data in seen.items() if self._sent.get(name) != data}
        self._sent |= changed
        return [format_sse_event(event=name, data_str=data.decode()) for name, data in changed.items()]


class SharedLook:
    """One look for all clients that ask within a period: the list of jobs costs a round trip a job."""

    def __init__(self, look: Look, *, period_s: float = PERIOD_S) -> None:
        self._look = look
        self._period_s = period_s
        self._lock = threading.Lock()
        self._seen: dict[str, object] = {}
        self._away: Unavailable | None = None
        self._until_s = 0.0

    def __call__(self) -> dict[str, object]:
        with self._lock:
            if time.monotonic() >= self._until_s:
                try:
                    self._seen, self._away = self._look(), None
                except Unavailable as error:  # it took a deadline: those that wait must not take one each, in turn
                    self._away = error
                self._until_s = time.monotonic() + self._period_s / 2
            if self._away is not None:
                raise self._away.with_traceback(None)
            return self._seen
