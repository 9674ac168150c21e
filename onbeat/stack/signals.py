"""Every request to end arrives as KeyboardInterrupt, so that there is one way out; a clean-up is not interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_on_signals() -> None:
    """Called once by the command line, in the main thread."""
    for number in ENDING:
        signal.signal(number, _interrupt)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Holds requests to end until the block is done; what the block does must have deadlines of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
