"""Follows a job to its end: events as they come, its status once a second.

Consumes:     server-sent events (a reader thread) and `GET /v1/jobs/{id}`.
Waits for:    the job's final state; how long a job may take is the job's own affair (its spec has the deadlines).
Unblocked by: a final state, or a gateway that stays away.
Produces:     a JobProgress, and calls to the view and to `tick` a few times a second.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from contracts.errors import Unavailable
from contracts.events import JobEvent
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient
from onbeat.client.progress import JobProgress
from onbeat.terminal.job_view import JobView

T = TypeVar("T")

log = logging.getLogger(__name__)

TICK_S = 0.25
STATUS_EVERY_S = 1.0
LAST_EVENTS_S = 5.0
"""How long the rest of the events may take after the job's status is final."""


def follow(
    client: GatewayClient, job_id: str, *, view: JobView, tick: Callable[[], None] = lambda: None
) -> JobProgress:
    """Returns when the job is over. Raises what `tick` raises, and Unavailable when the gateway stays away."""
    progress = JobProgress(client.job(job_id))
    reader = EventReader(client, job_id)
    asked_s = time.monotonic()
    away: Waiting | None = None
    while not progress.status.state.is_final:
        _show(reader.take(TICK_S), progress, view)
        tick()
        if time.monotonic() - asked_s >= STATUS_EVERY_S:
            asked_s = time.monotonic()
            away = _ask_status(client, progress, away)
        view.refresh(progress)
    last = Waiting("the last events", deadline_s=LAST_EVENTS_S)
    while not reader.ended and last.left_s > 0:
        _show(reader.take(TICK_S), progress, view)
    _show(reader.take(0.0), progress, view)
    view.refresh(progress)
    return progress


class EventReader:
    """Reads a job's events in a thread of its own, because a stream has no deadline of its own."""

    def __init__(self, client: GatewayClient, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._events: queue.SimpleQueue[JobEvent | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, name="events", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once all events are in the queue or were taken."""
        return not self._thread.is_alive()

    def take(self, timeout_s: float) -> list[JobEvent]:
        """Returns the events that are there, after a wait for the first; raises the error that ended the reader."""
        taken: list[JobEvent] = []
        while True:
            try:
                item = self._events.get(timeout=timeout_s) if timeout_s and not taken else self._events.get_nowait()
            except queue.Empty:
                return taken
            if isinstance(item, BaseException):
                raise item
            taken.append(item)

    def _read(self) -> None:
        try:
            for _, event in self._client.events(self._job_id):
                self._events.put(event)
        except BaseException as error:
            # The follower raises it: a dead reader must not look like a job without news.
            self._events.put(error)


def _show(events: list[JobEvent], progress: JobProgress, view: JobView) -> None:
    for event in events:
        progress.apply(event)
        view.event(event, progress)


def _ask_status(client: GatewayClient, progress: JobProgress, away: Waiting | None) -> Waiting | None:
    """A gateway that is being started again is not the end of the job, and neither is a machine that slept.

    away: begun at the first call in vain, not at the last answer; None after an answer.
    """
    try:
        progress.status = client.job(progress.status.job_id)
    except Unavailable as error:
        log.warning("%s", error)
        away = away or Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
        away.poke()
        return away
    return None


def until_over(client: GatewayClient, job: str, read: Callable[[], T]) -> Iterator[tuple[T, bool]]:
    """Yields (what `read` returns, True where the job has ended) once a second, until the job has ended.

    Raises Unavailable when the gateway stays away.
    """
    away: Waiting | None = None
    while True:
        try:
            is_over = client.job(job).state.is_final
            result = read()
        except Unavailable:
            away = away or Waiting(f"the gateway at {client.url}", deadline_s=UNREACHABLE_S)
            away.poke()
        else:
            away = None
            yield result, is_over
            if is_over:
                return
        time.sleep(STATUS_EVERY_S)
