"""The async form of a thing whose calls wait: each call runs in a thread, over the same core.

A call that is cancelled goes on in its thread. What it brings is not lost: the next call that takes something returns
it. What it puts, publishes or commits stands, and may be repeated.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
END: Any = object()


class Connects(Protocol):
    """What a core is: connected by `with`, or by what made it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> object: ...


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
        await asyncio.shield(self._closed(kind, error))

    async def _closed(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        await self._taking.settled()
        await asyncio.to_thread(self.core.__exit__, kind, error, None)
