"""A thread or task that others wait for, for as long as its process runs: whatever ends it ends the process.

A part that died without a word would leave its process alive and of no use: it beats, it answers that it is healthy,
and a request that needs that part has no answer. The supervisor of the process starts it anew.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def end_process(part: str, error: BaseException) -> None:
    """Has this process end as by SIGTERM, since a part of it has died. Any thread may call it.

    Args:
        part: Names it in the log, as "the look at the jobs' files".
        error: What it died of.
    """
    log.critical("%s died: this process ends", part, exc_info=error)
    os.kill(os.getpid(), signal.SIGTERM)


def lasting_thread(part: str, work: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that works until `work` returns; whatever `work` raises ends the process."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            end_process(part, error)

    thread = threading.Thread(target=run, name=part, daemon=True)
    thread.start()
    return thread
