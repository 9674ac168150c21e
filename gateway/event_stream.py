"""A job's events as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

Consumes:     the job's event stream in the broker, read in a thread so that the event loop never blocks.
Waits for:    the next event, by looking every POLL_S; a comment goes out when nothing else did for KEEP_ALIVE_S.
Unblocked by: the job's final state, a client that left, a gateway that ends, a broker that stays away.
Produces:     `id`, `event` and `data` fields; an id is the entry's, so that Last-Event-ID resumes after it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable
from dataclasses import dataclass

from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from broker.job_store import JobStore
from contracts.encoding.wire import encode_json
from contracts.errors import DeadlineExceeded, InvalidInput, OnbeatError, Unavailable
from contracts.events import JobEvent
from onbeat.base.process.waiting import Waiting, wait_for

POLL_S = 0.25
KEEP_ALIVE_S = 15.0
BROKER_AWAY_S = 60.0
"""How long a stream stays open while the broker does not answer."""
MAX_EVENTS = 100
EVENT_ID = re.compile(r"(\d{1,20})(?:-(\d{1,20}))?", re.ASCII)
LAST_PART = 2**64 - 1
"""The largest that each of the two parts of an entry's id may be."""
FIRST = "0-0"

log = logging.getLogger(__name__)


def resume_point(last_event_id: str | None, *, field: str = "Last-Event-ID") -> str:
    """Returns the entry id to go on after. Raises InvalidInput."""
    if not last_event_id:
        return FIRST
    event_id = EVENT_ID.fullmatch(last_event_id)
    parts = (int(event_id[1]), int(event_id[2] or 0)) if event_id else (LAST_PART, LAST_PART)
    # After the very last id there is none, and the server refuses to look for one.
    if max(parts) > LAST_PART or min(parts) == LAST_PART:
        raise InvalidInput("is not an event id of this stream", field=field)
    return last_event_id


@dataclass(kw_only=True)
class EventStream:
    """The stream of a job's events for one client.

    It ends after the event of the job's final state, unless the job was resumed since.
    """

    jobs: JobStore
    job_id: str
    after: str
    """The newest event that the client has."""
    closing: asyncio.Event
    """Set when the gateway ends."""
    keep_alive_s: float = KEEP_ALIVE_S

    async def __aiter__(self) -> AsyncIterator[bytes]:
        broker_away = Waiting(f"the broker, for the events of {self.job_id}", deadline_s=BROKER_AWAY_S)
        said_s = time.monotonic()
        while not self.closing.is_set():
            events = []
            pause_s = POLL_S
            try:
                events, pause_s = await run_in_threadpool(self._look)
            except Unavailable as error:
                try:
                    broker_away.poke()
                except DeadlineExceeded as late:
                    log.warning("%s: %s; the client may connect again", late, error)
                    return
            except OnbeatError as error:  # the head is sent: all that is left is to end, and the client asks again
                log.warning("the events of %s end: %s", self.job_id, error)
                return
            else:
                broker_away.progress()
            for event in events:
                yield event
            if pause_s is None:
                return
            if events:
                said_s = time.monotonic()
            elif time.monotonic() - said_s >= self.keep_alive_s:
                said_s = time.monotonic()
                yield format_sse_event(comment="keep-alive")
            await wait_for(self.closing, pause_s)

    def _look(self) -> tuple[list[bytes], float | None]:
        """Returns events, and the seconds until the next look; None ends the stream. It blocks; raises OnbeatError.

        The state is read first: a job that was final before the look has no event after it.
        """
        is_final = self.jobs.state(self.job_id).is_final
        rows = self.jobs.events_after(self.job_id, self.after, count=MAX_EVENTS)
        if not rows:
            return [], None if is_final else POLL_S
        self.after = rows[-1][0]
        # There may be more than these, or none any more, which the next look says.
        pause_s = 0.0 if is_final or len(rows) == MAX_EVENTS else POLL_S
        return [encode_event(event_id, event) for event_id, event in rows], pause_s


class CountedStream(EventSourceResponse):
    """An answer that counts from where it is made: of many requests at once no more are made than may be."""

    def __init__(self, stream: AsyncIterable[bytes], *, count: Callable[[int], None]) -> None:
        """count: adds to the number of open streams, or raises."""
        super().__init__(stream, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._count = count
        count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._count(-1)


def encode_event(event_id: str, event: JobEvent) -> bytes:
    kind = str(event.__struct_config__.tag)
    return format_sse_event(id=event_id, event=kind, data_str=encode_json(event).decode())
