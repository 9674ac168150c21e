"""Works that do nothing but what a test asks for: they note when they begin and end, and wait, die or don't listen."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.errors import InvalidInput, Unavailable
from contracts.settings import StackSettings
from contracts.tasks.records import TaskArguments, TaskResult
from onbeat.tasks.attempt import Progress

TENTHS = 1000
"""A version is the number of a behaviour times this, and the tenths of a second that it takes."""
MUTEX_BYTES = 64
QUEUES = "onbeat:celery:"
"""What stands before the name of a queue of Celery's in Redis."""
BALLAST = "onbeat:{job-0123456789ab}:ballast"
"""A key that fills a server, and that a task may remove."""


def asked(behaviour: str, *, seconds: float = 0.0, job_id: str = "") -> TaskArguments:
    """Returns the arguments that ask for a behaviour, by its name in BEHAVIOURS."""
    number = list(BEHAVIOURS).index(behaviour)
    return TaskArguments(job_id=job_id, version=number * TENTHS + int(seconds * 10))


def note(folder: Path, task_id: str, word: str) -> None:
    """Adds a line to what is known of a task's runs: a short write that appends is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / task_id, "a") as file:
        file.write(f"{word} {os.getpid()}\n")


def notes(folder: Path, task_id: str) -> list[tuple[str, int]]:
    """Returns (word, process) of each note, oldest first."""
    path = folder / task_id
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def notes_of(run_root: str) -> Path:
    """Returns the folder of the notes."""
    return Path(run_root) / "notes"


def work(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """The function of every kind."""
    number, tenths = divmod(attempt.arguments.version or 0, TENTHS)
    folder = notes_of(settings.run_root)
    note(folder, attempt.task_id, "begun")
    try:
        list(BEHAVIOURS.values())[number](tenths / 10, broker)
        progress.add(files=1)
        note(folder, attempt.task_id, "done")
    finally:
        note(folder, attempt.task_id, "left")
    return TaskResult(num_jobs=1)


def sleep(seconds: float, _: Any) -> None:
    """Can be interrupted."""
    time.sleep(seconds)


def swallow_errors(seconds: float, _: Any) -> None:
    """Goes on after each Exception, as a library does that tries again."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        try:
            time.sleep(0.1)
        except Exception:
            continue


def swallow_all(seconds: float, _: Any) -> None:
    """Goes on after everything, which no work may."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        try:
            time.sleep(0.1)
        except BaseException:
            continue


def hold_the_interpreter(_: float, __: Any) -> None:
    """Stands in C for ever, and no other thread of the process runs meanwhile."""
    library = ctypes.PyDLL(None)
    mutex = ctypes.create_string_buffer(MUTEX_BYTES)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def die(_: float, __: Any) -> None:
    """As the kernel ends a process where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def leave(_: float, __: Any) -> None:
    """As a library that would end its process."""
    raise SystemExit(3)


def refuse(_: float, __: Any) -> None:
    """As a task whose input is wrong."""
    raise InvalidInput("it has no such version", field="version")


def miss(_: float, __: Any) -> None:
    """As a task whose store is away."""
    raise Unavailable("the store is away")


def free(_: float, broker: Broker) -> None:
    """Frees memory of a server."""
    with broker.call():
        broker.redis.unlink(BALLAST)


BEHAVIOURS: dict[str, Callable[[float, Any], None]] = {
    "sleeps": sleep,
    "swallows errors": swallow_errors,
    "swallows all": swallow_all,
    "holds the interpreter": hold_the_interpreter,
    "dies": die,
    "leaves": leave,
    "is refused": refuse,
    "misses a store": miss,
    "frees memory": free,
}
