"""A wait with a deadline that says what it waits for (I8).

    waiting = Waiting("6 of 8 batches of iteration 3", deadline_s=3600.0)
    while not ready():
        waiting.poke()
        ...block for a moment...

The loop stays the caller's: a poke only reads the clock, logs once, or raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Any, TypeVar

from contracts.errors import DeadlineExceeded

LOG_AFTER_S = 10.0
"""A wait shorter than this is normal and stays unlogged."""

log = logging.getLogger(__name__)

A = TypeVar("A")


@dataclass
class Waiting:
    """A wait that can't hang in silence: it logs once after LOG_AFTER_S, and raises DeadlineExceeded after
    `deadline_s`.

    The loop that waits creates it and calls `poke` on every turn. `with Waiting(...) as waiting:` also logs the end of
    a wait that was logged as long.
    """

    what: str
    _: KW_ONLY
    deadline_s: float
    cure: str | None = None
    clock: Callable[[], float] = time.monotonic
    _logged: bool = False

    def __post_init__(self) -> None:
        self._started_s = self.clock()

    @property
    def waited_s(self) -> float:
        return self.clock() - self._started_s

    @property
    def left_s(self) -> float:
        """Seconds to the deadline, never below 0.0: the longest that the caller should block."""
        return max(0.0, self.deadline_s - self.waited_s)

    def poke(self, what: str | None = None) -> None:
        """Checks the deadline; call it on every turn of the loop.

        Args:
            what: The thing that is missing now, for the log and the error; None leaves it as it was.

        Raises:
            DeadlineExceeded: The deadline has passed.
        """
        if what is not None:
            self.what = what
        waited_s = self.waited_s
        if waited_s >= self.deadline_s:
            raise DeadlineExceeded(f"waited {waited_s:.0f} s for {self.what}", cure=self.cure)
        if waited_s >= LOG_AFTER_S and not self._logged:
            self._logged = True
            log.info("waiting for %s, %.0f s so far, giving up after %.0f s", self.what, waited_s, self.deadline_s)

    def progress(self) -> None:
        """Starts the deadline and the log line again, since the awaited work went on."""
        self._started_s = self.clock()
        self._logged = False

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._logged and error is None:
            log.info("no longer waiting for %s, after %.0f s", self.what, self.waited_s)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def tried_again(
    what: str,
    ask: Callable[[], Awaitable[A]],
    *,
    pauses: Iterable[float],
    helps: Callable[[Exception, float], bool],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> A:
    """Calls `ask` until it succeeds, with a pause before each further call.

    Args:
        what: The request, for the log.
        ask: The request.
        pauses: Seconds before each further call; the last error is raised after them.
        helps: Returns True where another call, after so many seconds, may succeed after this error.
        sleep: Waits.

    Returns:
        The result of `ask`.
    """
    for pause_s in pauses:
        try:
            return await ask()
        except Exception as error:
            if not helps(error, pause_s):
                raise
            log.warning("%s: %s; again in %.1f s", what, error, pause_s)
        await sleep(pause_s)
    return await ask()


def backoff(*, base_s: float, cap_s: float, jitter: Callable[[], float] = random.random) -> Iterator[float]:
    """Yields pauses with full jitter, without end.

    Args:
        base_s: The first pause's upper bound in seconds; it doubles each time.
        cap_s: The greatest upper bound.
        jitter: Returns numbers in [0, 1).
    """
    while True:
        yield jitter() * base_s
        base_s = min(cap_s, 2 * base_s)


def run_apart(coroutine: Coroutine[Any, Any, A]) -> A:
    """Runs a coroutine to its end in a thread with its own event loop: the caller's thread may run one already."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="asked") as thread:
        return thread.submit(asyncio.run, coroutine).result()
