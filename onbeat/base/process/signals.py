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
    """Has SIGTERM and SIGINT end the process with code 0, also where uvicorn repeats the one that stopped it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))


def end_on_signals() -> None:
    """Requests to end raise KeyboardInterrupt; the command line calls this once, in the main thread."""
    for number in ENDING:
        signal.signal(number, signal.default_int_handler)


@contextlib.contextmanager
def uninterrupted(*, answered_after: bool = False) -> Iterator[None]:
    """Holds back signals that ask the process to end until the block is done, which must have deadlines of its own.

    A child's start needs that: what hooks at a fork raise is lost.

    Args:
        answered_after: True has the first of them raised again after the block; else they are dropped.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda signum, _: came.append(signum)) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if answered_after and came:
        signal.raise_signal(came[0])
