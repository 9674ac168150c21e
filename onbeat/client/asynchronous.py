"""The same three parts for an event loop (onbeat/client/in_threads.py).

    async with AsyncStage("job-1", "brevity") as stage:
        async for rows in stage:
            await stage.put(rows, {"brevity": await scores_of(rows["text"])})

What a cancelled call brings, the next `get`, `claim` or step of an iteration returns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from contracts.errors import JobEnded
from onbeat.client.consumer import Consumer
from onbeat.client.in_threads import InThreads, in_thread
from onbeat.client.producer import Producer
from onbeat.client.samples import PromptClaim
from onbeat.client.stage import Stage, StageRows
from onbeat.client.training.arrivals import TrainingIteration, TrainingRows

T = TypeVar("T")


class AsyncStage(InThreads[Stage]):
    """`onbeat.client.Stage` for an event loop."""

    def __init__(self, job_id: str, name: str, **options: Any) -> None:
        """options: those of Stage."""
        super().__init__(lambda: Stage(job_id, name, **options))

    async def get(self, max_rows: int = 256, *, timeout_s: float = 60.0) -> StageRows | None:
        """Takes rows as Stage.get does."""
        return await self._taking(lambda: self.core.get(max_rows, timeout_s=timeout_s))

    async def __aiter__(self) -> AsyncIterator[StageRows]:
        async for rows in _until_ended(lambda: self.get(timeout_s=1.0)):
            yield rows

    put = in_thread(Stage.put)
    fail = in_thread(Stage.fail)
    release = in_thread(Stage.release)


class AsyncProducer(InThreads[Producer]):
    """`onbeat.client.Producer` for an event loop; `core` has what needs no waiting: spec, model_folder, make_model."""

    def __init__(self, job_id: str, **options: Any) -> None:
        """options: those of Producer."""
        super().__init__(lambda: Producer(job_id, **options))

    async def claim(self, *, timeout_s: float = 60.0) -> PromptClaim | None:
        """Claims as Producer.claim does."""
        return await self._taking(lambda: self.core.claim(timeout_s=timeout_s))

    async def __aiter__(self) -> AsyncIterator[PromptClaim]:
        async for claim in _until_ended(lambda: self.claim(timeout_s=1.0)):
            yield claim

    load = in_thread(Producer.load)
    score = in_thread(Producer.score)
    publish = in_thread(Producer.publish)
    fail = in_thread(Producer.fail)
    release = in_thread(Producer.release)


class AsyncConsumer(InThreads[Consumer]):
    """`onbeat.client.Consumer` for an event loop; `core` has spec, model_folder, version and state."""

    def __init__(self, job_id: str, **options: Any) -> None:
        """options: those of Consumer."""
        super().__init__(lambda: Consumer(job_id, **options))

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        """A job that has ended ends the block as well."""
        await super().__aexit__(kind, error, trace)
        return isinstance(error, JobEnded)

    def __aiter__(self) -> AsyncIterator[TrainingIteration]:
        """Yields the open iterations; `rows_of` goes through one."""
        return self._taking.over(iter(self.core))

    def rows_of(self, iteration: TrainingIteration) -> AsyncIterator[TrainingRows]:
        """Yields its micro-batches."""
        return self._taking.over(iter(iteration))

    begin = in_thread(Consumer.begin)
    commit = in_thread(Consumer.commit)
    """A cancelled one goes on, and the iteration is committed once."""
    fail = in_thread(Consumer.fail)


async def _until_ended(take: Callable[[], Awaitable[T | None]]) -> AsyncIterator[T]:
    """Yields what is taken, until the job has ended."""
    while True:
        try:
            found = await take()
        except JobEnded:
            return
        if found is not None:
            yield found
