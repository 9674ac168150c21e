"""Calls foreign code, and looks after each call for what it left behind: a thread, a timer, a copy of the process."""

from __future__ import annotations

import _thread
import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

from contracts.environments.service import FailureReason
from onbeat.base.cage.fault_text import fault_text, print_traceback
from onbeat.environments.author import BadTask, NoAnswer, RewrittenHistory

MAX_DETAIL_CHARS = 1000
NUMPY_SEEDS = 2**32


class Failed(Exception):
    """The session is over, and why."""

    def __init__(self, reason: FailureReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailureReason = reason
        self.detail = detail[:MAX_DETAIL_CHARS].encode(errors="backslashreplace").decode()


class Guard:
    """Calls an environment's code in this process. After a call that leaves what it may not, `retires` is set.

    `is_exhausted`: there was no memory for a call, which may be another session's doing.
    """

    def __init__(self, *, handle: int, allows_threads: bool, swaps_random: bool) -> None:
        """handle: the socket that answers go through. swaps_random: each session has a global generator of its own."""
        self.retires = False
        self.is_exhausted = False
        self._pid = os.getpid()
        self._handle = handle
        self._socket = os.fstat(handle).st_ino
        self._allows_threads = allows_threads
        self._swaps_random = swaps_random
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Raises Failed."""
        try:
            returned = function(*arguments)
            if hasattr(returned, "__await__"):
                returned = self._awaited(returned)
        except BadTask as error:
            self._look_around()
            raise Failed("bad_task", str(error)) from None
        except RewrittenHistory as error:
            self._look_around()
            raise Failed("rewritten", str(error)) from None
        except NoAnswer as error:
            self._look_around()
            raise Failed("invalid_reply", str(error)) from None
        except BaseException as error:  # foreign code may also raise SystemExit, or what is no Exception
            self._look_around()
            self.is_exhausted |= isinstance(error, MemoryError)
            print_traceback("the environment raised", error)
            raise Failed("raised", fault_text(error)) from None
        left = self._look_around()
        if left:
            raise Failed("invalid_reply", left)
        return returned

    def call_with_random(self, state: Any, function: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
        """As `call`, under a state of the global generators; returns what it returned, and their new state."""
        if not self._swaps_random:
            return self.call(function, *arguments), None
        numpy = sys.modules.get("numpy.random")
        if isinstance(state, int):
            random.seed(state)
            if numpy is not None:
                numpy.seed(state % NUMPY_SEEDS)
        else:
            random.setstate(state[0])
            if numpy is not None and state[1] is not None:
                numpy.set_state(state[1])
        returned = self.call(function, *arguments)
        return returned, (random.getstate(), None if numpy is None else numpy.get_state())

    def _look_around(self) -> str:
        """Says what the call left running; ends a copy of this process, and one that can't answer any more."""
        if os.getpid() != self._pid:
            os._exit(1)
        try:
            if os.fstat(self._handle).st_ino != self._socket:
                os._exit(3)
        except OSError:
            os._exit(3)
        if _thread._count() and not self._allows_threads:
            self.retires = True
            return "it left a thread running, and says nothing of threads"
        if signal.getitimer(signal.ITIMER_REAL)[0]:
            self.retires = True
            return "it left a timer running"
        return ""

    def _awaited(self, awaitable: Any) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(awaitable)
