"""The spans of a worker's work, on their way to the timelines of its jobs.

    its work ─ record ─▶ Spans ─ once a second, and when it is idle ─▶ Reports ─▶ the job's spans in Redis

Reports   waits for something to report, then for the next second or for an idle worker; unblocked by either; produces
          one small write to Redis, in a thread, beside what is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from broker.spans import MAX_SPANS
from contracts.events import TimelineSpan
from onbeat.base.process.waiting import wait_for
from onbeat.work.calls import BrokerCalls

REPORT_S = 1.0
"""Shortest time between two reports of a busy worker."""

Report = Callable[[str, Sequence[TimelineSpan]], None]
"""Tells spans to a job, by its id; they are lost without harm."""


class Spans:
    """The newest spans of each job that are not reported yet. The event loop's thread alone touches it."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._by_job: dict[str, deque[TimelineSpan]] = {}
        self.changed = asyncio.Event()
        """Set while there is something to report."""
        self.idle = asyncio.Event()
        """Set while the worker holds nothing."""

    def record(
        self, job_id: str, what: str, *, iteration: int, batch_id: str = "", started_s: float, ended_s: float
    ) -> None:
        """Books what was done for a job; times are Unix times."""
        span = TimelineSpan(
            who=self._who, what=what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=ended_s
        )
        self._by_job.setdefault(job_id, deque(maxlen=MAX_SPANS)).append(span)
        self.changed.set()

    def take(self) -> tuple[str, list[TimelineSpan]] | None:
        """Returns a job with what has not been reported of it, and forgets that; None where there is nothing."""
        if not self._by_job:
            self.changed.clear()
            return None
        job_id, spans = self._by_job.popitem()
        return job_id, list(spans)


class Reports:
    """Sends spans to their jobs: `run` reports until it is cancelled; it dies of a broker that stays away."""

    def __init__(self, spans: Spans, calls: BrokerCalls, report: Report) -> None:
        self._spans = spans
        self._calls = calls
        self._report = report
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        while True:
            await self._spans.changed.wait()
            await wait_for(self._spans.idle, REPORT_S)
            await self.send()

    async def send(self) -> None:
        """Reports what there is. Where it is cancelled, its report goes on, and the next one waits for that."""
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
            self._sending.add_done_callback(_looked_at)
        await asyncio.wait({self._sending})
        sent = self._sending
        self._sending = None
        sent.result()

    async def _send_all(self) -> None:
        while (report := self._spans.take()) is not None:
            await self._calls(self._report, *report)


def _looked_at(task: asyncio.Task[None]) -> None:
    """Takes note of how a report ended, so that one that a stop has left behind leaves no traceback."""
    if not task.cancelled():
        task.exception()
