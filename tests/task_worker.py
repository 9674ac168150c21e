"""A worker of tasks as a process, for tests whose stack has none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from broker.connection.client import Broker
from broker.presence import TaskPresence
from contracts.settings import StackSettings
from onbeat.base.process.child_process import ChildProcess
from tests.forked import TASK_WORKER, ForkedChild
from tests.until import until

END_S = 60.0
"""Longest that a worker may take to end; a broken one is killed."""


@contextmanager
def task_worker(settings: StackSettings, broker: Broker, log: Path, *queues: str) -> Iterator[ChildProcess]:
    """A worker that is ready; it ends with the block.

    Args:
        settings: Its own: which Redis user it is, and its run root.
        broker: Of the same Redis, to see it come.
        log: A file for what it says.
        queues: What it takes from; none: all of them.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | settings.environment()
    environment.pop("ONBEAT_API_KEY", None)
    presence = TaskPresence(broker)
    before = {worker.worker_id for worker in presence.live()}
    process = ForkedChild(
        "worker of tasks", command=(sys.executable, "-m", TASK_WORKER, *queues), environment=environment, log_path=log
    )
    process.start()
    try:
        until(
            lambda: not process.is_running or {worker.worker_id for worker in presence.live()} - before,
            "the worker of tasks",
        )
        assert process.is_running, process.tail()
        yield process
    finally:
        process.stop(grace_s=END_S)
