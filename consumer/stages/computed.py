"""What this worker computed, on its way to the timelines of its jobs; a heartbeat tells it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from broker.spans import MAX_SPANS
from broker.stage_side import ClaimedItem
from consumer.stages.served_stages import ServedStage
from contracts.events import TimelineSpan
from contracts.timeline import COMPUTE, STAGE_WORKER

Report = Callable[[str, Sequence[TimelineSpan]], None]
"""Tells spans to a job, by its id; they are lost without harm."""


class Computed:
    """The event loop's thread alone touches it, but for `report`."""

    def __init__(self, worker_id: str, report: Report) -> None:
        self._who = f"{STAGE_WORKER} {worker_id}"
        self._report = report
        self._spans: dict[str, deque[TimelineSpan]] = {}
        self._telling: asyncio.Task[None] | None = None

    def add(self, stage: ServedStage, item: ClaimedItem, seconds: float) -> None:
        """Books an item whose columns are there. seconds: from its claim until now."""
        now_s = time.time()
        span = TimelineSpan(
            who=self._who,
            what=f"{COMPUTE} {stage.stage.name}",
            iteration=item.iteration,
            batch_id=item.batch_id,
            started_s=now_s - seconds,
            ended_s=now_s,
        )
        self._spans.setdefault(stage.job_id, deque(maxlen=MAX_SPANS)).append(span)

    async def tell(self) -> None:
        """Reports what there is, and forgets it. Raises BrokerUnavailable.

        A call that is cancelled leaves its report to the next one, the last word of a worker that stops.
        """
        if self._telling is None:
            self._telling = asyncio.create_task(self._report_all())
        await asyncio.wait({self._telling})
        told, self._telling = self._telling, None
        told.result()

    async def _report_all(self) -> None:
        while self._spans:
            job_id, spans = self._spans.popitem()
            await asyncio.to_thread(self._report, job_id, list(spans))
