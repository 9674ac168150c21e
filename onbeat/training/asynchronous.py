"""A run for an event loop: each call runs in a thread, over the same core.

async with onbeat.train_async("configs/demo.toml", iterations=50) as run:
    async for iteration in run:
        print(iteration.number, iteration.reward_mean)
    model, tokenizer = await run.export("my-model")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from contracts.events import IterationMetrics
from contracts.jobs import JobStatus
from onbeat.client.in_threads import InThreads, in_thread
from onbeat.training.run import Run
from onbeat.training.start import attach, train


class AsyncRun(InThreads[Run]):
    """`Run` for an event loop; `core` has what needs no waiting: id, folder, page."""

    def __aiter__(self) -> AsyncIterator[IterationMetrics]:
        """Yields each iteration as soon as it is committed."""
        return self._taking.over(iter(self.core))

    async def status(self) -> JobStatus:
        """Tells the job's state, and why it is in it."""
        return await asyncio.to_thread(lambda: self.core.status)

    async def metrics(self) -> list[IterationMetrics]:
        """Tells the committed iterations so far, oldest first."""
        return await asyncio.to_thread(lambda: self.core.metrics)

    result = in_thread(Run.result)
    cancel = in_thread(Run.cancel)
    verify = in_thread(Run.verify)
    save_model = in_thread(Run.save_model)
    export = in_thread(Run.export)


def train_async(*spec: Any, **options: Any) -> AsyncRun:
    """`train` for `async with`, which submits the job and has its run; the arguments are those of `train`."""
    return AsyncRun(lambda: train(*spec, **options))


def attach_async(job_id: str, **options: Any) -> AsyncRun:
    """`attach` for `async with`; the options are those of `attach`."""
    return AsyncRun(lambda: attach(job_id, **options))
