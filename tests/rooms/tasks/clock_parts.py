"""Processes of tasks, and what stands in for Celery's messages, for the tests of the clock and of what it starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from broker.connection.roles import CELERY, TASKS
from broker.task_store import TaskStore
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskState
from onbeat.stack.redis import EmbeddedRedis
from tests.pipeline import REPOSITORY

CLOCK, WORKER = "onbeat.tasks.clock", "onbeat.tasks"


class SentMessages:
    """A TaskMessages that keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []

    def send(self, task_id: str, queue: str) -> None:
        self.sent.append((task_id, queue))

    def close(self) -> None:
        """Nothing: it has no connection."""


def settings_of_tasks(server: EmbeddedRedis, run_root: Path, **chosen: object) -> StackSettings:
    """What the clock and the workers of a stack are told."""
    urls = {"redis_url": server.url_of(TASKS), "celery_url": server.url_of(CELERY)}
    return StackSettings(**urls, run_root=str(run_root), **chosen)  # type: ignore[arg-type]


@contextlib.contextmanager
def process_of(module: str, settings: StackSettings, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of tasks, which is killed at the end with its children."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | settings.environment() | {"OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def finish_all(store: TaskStore) -> list[str]:
    """Does what workers would: every task that waits is done. Returns the kinds."""
    kinds: list[str] = []
    for task in store.open():
        attempt = store.begin(task.task_id, worker=f"worker of {task.task_id}")
        assert attempt is not None
        store.end(attempt, TaskState.DONE)
        kinds.append(task.kind.value)
    return kinds
