"""The kinds of tasks, the queues that they wait in, and a task's life.

    queued ──▶ running ──▶ done
      │ ▲        │  ├────▶ failed
      │ └────────┘  └────▶ cancelled
      └──────────────────▶ cancelled

A running task whose worker is gone, or was asked to end, is queued again, three times at most.
"""

from __future__ import annotations

import re
from enum import Enum

TASK_ID = re.compile(r"task-[0-9a-f]{12}")


class TaskState(str, Enum):
    """Where a task is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """True where nothing of the task happens any more."""
        return self in (TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED)


class TaskQueue(str, Enum):
    """A queue for each kind of means that a task needs; a worker has one child for each queue that it takes from."""

    CHECK = "check"
    """A core, and the memory of a version. The run root may be read-only."""
    FILES = "files"
    """Disk. The run root is written to, and on each host that has a run root of its own a worker takes from it."""
    CLOCK = "clock"
    """Seconds."""


class TaskKind(str, Enum):
    """The kind of a task."""

    VERIFY = "verify"
    """Checks a job's audit chain again, and hashes the weights of its run folder."""
    EXPORT = "export"
    """Writes a version of a job as a Hugging Face folder below the run root, from which a client streams it."""
    BACKUP = "backup"
    """Copies Redis and the run folders, while jobs run."""
    DELETE = "delete"
    """Removes the files of a job whose keys are gone."""
    REMOVE_FILES = "remove_files"
    """Sees to the run folders of ended jobs: puts their audit chains aside, and removes what is due."""
    CLEAR_OBJECTS = "clear_objects"
    """Removes objects of the object store that no job names."""
    FORGET = "forget"
    """Removes the keys of ended jobs that are due and whose run folders hold their audit chains."""
    VERIFY_KEPT = "verify_kept"
    """Creates a task `verify` for each ended job whose run folder is kept."""

    @property
    def queue(self) -> TaskQueue:
        """The queue that tasks of this kind wait in."""
        return QUEUES[self]


QUEUES = {
    TaskKind.VERIFY: TaskQueue.CHECK,
    TaskKind.EXPORT: TaskQueue.FILES,
    TaskKind.BACKUP: TaskQueue.FILES,
    TaskKind.DELETE: TaskQueue.FILES,
    TaskKind.REMOVE_FILES: TaskQueue.FILES,
    TaskKind.CLEAR_OBJECTS: TaskQueue.FILES,
    TaskKind.FORGET: TaskQueue.CLOCK,
    TaskKind.VERIFY_KEPT: TaskQueue.CLOCK,
}
OF_HOST = "@"
"""Stands between a queue and the host whose workers alone take from it: `files@node-3`."""
QUEUE_NAME = re.compile(r"(?:check|files|clock)(?:@[A-Za-z0-9._-]{1,64})?")
"""The name of a queue in Redis and in Celery's messages."""


def queue_of_host(queue: TaskQueue, host: str) -> str:
    """Returns the queue of one host: `files@node-3`. What a queue's name can't hold of a host's becomes `-`."""
    return f"{queue.value}{OF_HOST}{re.sub(r'[^A-Za-z0-9._-]', '-', host)[:64]}"
