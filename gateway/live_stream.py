"""What changes while a client looks, as server-sent events: whole records, each sent when it differs from the last.

Consumes:     one look at the broker a period, in a thread so that the event loop never blocks.
Waits for:    a look that differs; a comment goes out when nothing else did for KEEP_ALIVE_S.
Unblocked by: a client that left, a gateway that ends, a job that is gone, a broker that stays away.
Produces:     `event` and `data` fields. There are no ids: a client that comes back gets the present whole.

While the broker doesn't answer, its problem is sent as an event `problem`, once; the next record takes it back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool

from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError, Unavailable
from contracts.problems import problem_body
from gateway.event_stream import BROKER_AWAY_S, KEEP_ALIVE_S, may_wait
from onbeat.process.waiting import Waiting

PERIOD_S = 1.0
PROBLEM = "problem"

log = logging.getLogger(__name__)

Look = Callable[[], dict[str, object]]
"""Reads the present: event name → record. It blocks; raises OnbeatError."""


@dataclass(kw_only=True)
class LiveStream:
    """One client's stream."""

    look: Look
    what: str
    """The thing that is looked at, for the log."""
    closing: asyncio.Event
    """Set when the gateway ends."""
    period_s: float = PERIOD_S
    keep_alive_s: float = KEEP_ALIVE_S
    _sent: dict[str, bytes] = field(default_factory=dict)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        broker_away = Waiting(f"the broker, for {self.what}", deadline_s=BROKER_AWAY_S)
        said_s = time.monotonic()
        while not self.closing.is_set():
            try:
                seen = await run_in_threadpool(self.look)
            except Unavailable as error:
                changed = self._changed({PROBLEM: _problem(error)})
                if not may_wait(broker_away, error):
                    return
            except OnbeatError as error:  # a job that is gone, or can't be read: the client is told, and it is the end
                yield _event(PROBLEM, _problem(error))
                return
            else:
                broker_away.progress()
                changed = self._changed({name: encode_json(record) for name, record in seen.items()})
            for name, data in changed.items():
                said_s = time.monotonic()
                yield _event(name, data)
            if time.monotonic() - said_s >= self.keep_alive_s:
                said_s = time.monotonic()
                yield format_sse_event(comment="keep-alive")
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closing.wait(), timeout=self.period_s)

    def _changed(self, seen: dict[str, bytes]) -> dict[str, bytes]:
        """After a problem all is sent again, so that the client knows it is over."""
        if PROBLEM in self._sent and PROBLEM not in seen:
            self._sent.clear()
        changed = {name: data for name, data in seen.items() if self._sent.get(name) != data}
        self._sent |= changed
        return changed


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


def _problem(error: OnbeatError) -> bytes:
    return problem_body(error.status, error.problem, field=error.field, cure=error.cure)


def _event(name: str, data: bytes) -> bytes:
    return format_sse_event(event=name, data_str=data.decode())
