"""The end of a process of tasks, which waits for no server: Celery's own waits for Redis to come back."""

from __future__ import annotations

import contextlib
import logging
import os
import time

import psutil

END_S = 10.0
"""Longest that a process takes to end from its SIGTERM on, whatever Redis does."""

log = logging.getLogger(__name__)


def end_by(until_s: float) -> None:
    """Ends this process with its children where it still lives then; for a thread of its own.

    until_s: by the monotonic clock.
    """
    while time.monotonic() < until_s:
        time.sleep(0.1)
    log.warning("this process does not end by itself: it is ended")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    logging.shutdown()
    os._exit(0)
