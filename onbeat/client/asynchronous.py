"""The same three parts for an event loop: each call runs in a thread, over the same core.

    async with AsyncStage("job-1", "brevity") as stage:
        async for rows in stage:
            await stage.put(rows, {"brevity": await scores_of(rows["text"])})

A call that is cancelled goes on in its thread. What it brings is not lost: the next `get`, `claim` or step of an
iteration returns it. What it puts, publishes or commits stands, and may be repeated.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from contracts.errors import JobEnded
from onbeat.client.consumer import Consumer
from onbeat.client.producer import Producer
from onbeat.client.samples import PromptClaim
from onbeat.client.stage import Stage, StageRows
from onbeat.client.training.arrivals import MicroBatch, TrainingIteration

T = TypeVar("T")
P = ParamSpec("P")
END: Any = object()


class Connects(Protocol):
    """What a core is: connected by `with`, or by what made it."""

    def __enter__(self) -> Self: ...

    def close(self) -> None: ...


Core = TypeVar("Core", bound=Connects)


def in_thread(call: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Awaitable[T]]:
    """The method of the core as one of its async form."""

    @functools.wraps(call)
    async def calls(form: InThreads[Any], *args: P.args, **options: P.kwargs) -> T:
        return await asyncio.to_thread(call, form.core, *args, **options)

    return calls


class Taking(Generic[T]):
    """Calls of a core that take something, one at a time: what a cancelled one takes is the next one's answer."""

    def __init__(self) -> None:
        self._running: asyncio.Future[T] | None = None

    async def __call__(self, work: Callable[[], T]) -> T:
        running = self._running
        if running is None:
            running = self._running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            answer = await asyncio.shield(running)
        except asyncio.CancelledError:
            raise  # it goes on in its thread, and the next call has what it brings
        except BaseException:
            self._running = None
            raise
        self._running = None
        return answer

    async def over(self, iterator: Iterator[T]) -> AsyncIterator[T]:
        """Yields what the iterator yields, each step in a thread."""
        while (found := await self(lambda: next(iterator, END))) is not END:
            yield found

    async def settled(self) -> None:
        """Waits for a call that was cancelled, whatever it brings."""
        if self._running is not None:
            await asyncio.wait([self._running])


class InThreads(Generic[Core]):
    """A core whose calls run in threads; `core` has what needs no waiting."""

    def __init__(self, make: Callable[[], Core]) -> None:
        """make: the core, not connected; `async with` connects it."""
        self._make = make
        self._taking: Taking[Any] = Taking()

    async def __aenter__(self) -> Self:
        self.core = await asyncio.to_thread(lambda: self._make().__enter__())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool | None:
        await asyncio.shield(self._closed())

    async def _closed(self) -> None:
        await self._taking.settled()
        await asyncio.to_thread(self.core.close)


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

    def rows_of(self, iteration: TrainingIteration) -> AsyncIterator[MicroBatch]:
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
