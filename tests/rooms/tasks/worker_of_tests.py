"""`python -m tests.rooms.tasks.worker_of_tests [QUEUE …]`: the worker as it is, with works of tests and shorter times.

A folder `name server` in the run root, with a file `hangs`, has each name be looked up for ever, in C.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from pathlib import Path
from typing import Any

import broker.task_store
from contracts.tasks.kinds import TaskKind
from onbeat.tasks import __main__, attempt, worker, works
from tests.rooms.tasks.works_of_tests import MUTEX_BYTES

LEASE_S = 4.0
HARD_LIMIT_S = 3.0
HANGS = "name_server_hangs"
"""A file of the run root."""


def _shorten() -> None:
    broker.task_store.LEASE_S = LEASE_S
    attempt.RENEW_EVERY_S = 0.5
    attempt.GRACE_S = 1.5
    worker.HARD_LIMIT_S = HARD_LIMIT_S
    worker.LOOK_S = 1.0
    works.WORKS = {kind: "tests.rooms.tasks.works_of_tests:work" for kind in TaskKind if kind is not TaskKind.BACKUP}


def _with_hanging_names() -> None:
    look_up = socket.getaddrinfo
    library = ctypes.CDLL(None)
    hangs = Path(os.environ["ONBEAT_RUN_ROOT"]) / HANGS

    def getaddrinfo(*arguments: Any, **keywords: Any) -> Any:
        if hangs.exists():
            # No signal interrupts it, as none interrupts the C library's wait for a name server.
            mutex = ctypes.create_string_buffer(MUTEX_BYTES)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        return look_up(*arguments, **keywords)

    socket.getaddrinfo = getaddrinfo


if __name__ == "__main__":
    _shorten()
    _with_hanging_names()
    sys.exit(__main__.main(sys.argv[1:]))
