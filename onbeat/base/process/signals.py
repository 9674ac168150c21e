"""How a process answers a request to end: a service leaves with exit code 0, the command line by KeyboardInterrupt.

Both have one way out, and a clean-up is not interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_cleanly_on_signals() -> None:
    """SIGTERM and SIGINT end the process with code 0, also where uvicorn repeats the one that stopped it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def end_on_signals() -> None:
    """Requests to end raise KeyboardInterrupt; the command line calls this once, in the main thread."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted(*, answered_after: bool = False) -> Iterator[None]:
    """Holds requests to end until the block is done, which must have deadlines of its own; they are dropped, or
    answered then. A child's start needs that: what its hooks at a fork raise is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    held = {number: signal.signal(number, lambda one, _: came.append(one)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
    if answered_after and came:
        signal.raise_signal(came[0])
