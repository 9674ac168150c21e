"""Calls of the broker from an event loop: they block, so threads make them; an outage is outlasted by repeating them.

await calls(side.claim, …) ─▶ thread ─▶ Redis ─┬─▶ answer
                                ▲              ├─ away ─┐ until timeout_s is over: BrokerUnavailable
                                │              ├─ full ─┤ until full_timeout_s is over: BrokerFull
                                └── pause ◀────┴────────┘
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from broker.connection.deadlines import within
from contracts.errors import BrokerFull, BrokerUnavailable

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
NUM_THREADS = 9
"""Calls at once: the serve loop's, the heartbeat's, the receipt's, and one for each batch that is being published."""


@dataclass(eq=False, kw_only=True)
class BrokerCalls:
    """Awaitable calls of the broker, with two deadlines: for a server that is away, and for one that is full.

    A full server is no outage: the work that it refuses is done, and is kept until there is room (back-pressure). The
    worker's main function creates it.
    """

    timeout_s: float
    full_timeout_s: float
    end_blocked: Callable[[], None] = lambda: None
    """Ends a call that blocks in another thread, as `Broker.break_off` does."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._is_broken_off = False
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="broker")

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Answers the function's result. Every transition is safe to repeat: a call that lost its answer is.

        Raises BrokerUnavailable after timeout_s without an answer, or once they are broken off, and BrokerFull after
        full_timeout_s without room.
        """
        work = partial(function, *args, **kwargs)
        began_s = self.clock()
        full_since_s = None
        is_said = False
        pause_s = FIRST_PAUSE_S
        while True:
            left_s = began_s + self.timeout_s - self.clock()
            try:
                return await asyncio.get_running_loop().run_in_executor(self._threads, _ending, left_s, work)
            except BrokerFull as error:
                # The server answers: how long it may be away begins anew.
                began_s = now_s = self.clock()
                if full_since_s is None:
                    full_since_s = now_s
                left_s = full_since_s + self.full_timeout_s - now_s
                failure: BrokerFull | BrokerUnavailable = error
            except BrokerUnavailable as error:
                left_s = began_s + self.timeout_s - self.clock()
                failure = error
            if left_s <= 0 or self._is_broken_off:
                raise failure
            if not is_said:
                is_said = True
                log.warning("%s; trying again for %.0f s", failure, left_s)
            await self.sleep(min(pause_s, left_s))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def break_off(self) -> None:
        """Ends the calls that wait for a server, and those that come: their answers are of no use any more."""
        self._is_broken_off = True
        self.end_blocked()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def last_word(word: Awaitable[object], patience_s: float) -> None:
    """Says it to the server at a worker's end; one that is away forgets the worker by itself, and holds nothing up."""
    with contextlib.suppress(TimeoutError, BrokerUnavailable):
        async with asyncio.timeout(patience_s):
            await word


def _ending(left_s: float, work: Callable[[], T]) -> T:
    """Does the work, whose calls of the broker end within `left_s`."""
    with within(left_s):
        return work()
