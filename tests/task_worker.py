"""A worker of tasks as a process, for tests whose stack has none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from broker.connection.client import Broker
from broker.presence import TaskPresence
from contracts.settings import StackSettings
from tests.until import until

TASK_WORKER = "onbeat.tasks"
"""The module that `python -m` runs."""
END_S = 60.0
"""Longest that a worker may take to end; a broken one is killed."""


@contextmanager
def task_worker(settings: StackSettings, broker: Broker, log: Path, *queues: str) -> Iterator[subprocess.Popen[bytes]]:
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
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", TASK_WORKER, *queues], env=environment, stdout=output, stderr=output
        )
    try:
        until(
            lambda: process.poll() is not None or {worker.worker_id for worker in presence.live()} - before,
            "the worker of tasks",
        )
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait()
