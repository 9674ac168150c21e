"""The tasks of a stack as Prometheus sees them: their queues, how they have ended, and the clock that starts some."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from broker.task_store import TaskStore
from contracts.tasks.kinds import TaskKind, TaskState
from gateway.metrics.families import COUNTER, GAUGE, Family

TASK_FAMILIES = (
    Family("onbeat_task_waiting", GAUGE, "Tasks that wait in a queue.", ("queue",)),
    Family("onbeat_task_oldest_seconds", GAUGE, "Age of the oldest task that waits; 0 while none does.", ("queue",)),
    Family("onbeat_task_running", GAUGE, "Tasks of a queue that run.", ("queue",)),
    Family(
        "onbeat_task_workers",
        GAUGE,
        "Workers with a sign of life in the last 10 seconds that take from a queue.",
        ("queue",),
    ),
    Family("onbeat_task_ended", COUNTER, "Tasks that have ended, by kind and by how.", ("task", "state")),
    Family("onbeat_task_failed", COUNTER, "Tasks of a kind that have failed.", ("task",)),
    Family("onbeat_task_seconds", COUNTER, "How long the last attempts of ended tasks took together.", ("task",)),
    Family("onbeat_clock_held", GAUGE, "1 while a process holds the clock, which starts tasks by itself, else 0."),
    Family("onbeat_clock_interval_seconds", GAUGE, "How often the clock starts an entry.", ("entry",)),
    Family(
        "onbeat_clock_last_run_timestamp",
        GAUGE,
        "Unix time at which a task of an entry was done last; before the first, since when the clock has the entry.",
        ("entry",),
    ),
)


class TaskSample(NamedTuple):
    """A value of one of TASK_FAMILIES."""

    name: str
    value: float
    labels: tuple[str, ...] = ()


def task_samples(store: TaskStore) -> Iterator[TaskSample]:
    """Yields the samples of a scrape. Raises Unavailable, and ContractViolation over what another Onbeat wrote."""
    for queue in store.queues():
        labels = (queue.queue,)
        yield TaskSample("onbeat_task_waiting", queue.waiting, labels)
        yield TaskSample("onbeat_task_oldest_seconds", queue.oldest_s, labels)
        yield TaskSample("onbeat_task_running", queue.running, labels)
        yield TaskSample("onbeat_task_workers", queue.workers, labels)
    counts = store.counts()
    # Each kind and each end is there from the first scrape on: a rate needs the 0 before the first failure.
    for kind in TaskKind:
        for state in TaskState:
            if state.is_final:
                ended = counts.get((state.value, kind.value), 0)
                yield TaskSample("onbeat_task_ended", ended, (kind.value, state.value))
        failed = counts.get((TaskState.FAILED.value, kind.value), 0)
        yield TaskSample("onbeat_task_failed", failed, (kind.value,))
        milliseconds = counts.get(("ms", kind.value), 0)
        yield TaskSample("onbeat_task_seconds", milliseconds / 1000, (kind.value,))
    clock = store.clock()
    yield TaskSample("onbeat_clock_held", float(bool(clock.holder)))
    for entry in clock.entries:
        yield TaskSample("onbeat_clock_interval_seconds", entry.interval_s, (entry.name,))
        # An entry that was taken out and is back has an old run, of which no alert may speak.
        last_s = max(entry.done_s, entry.known_s)
        yield TaskSample("onbeat_clock_last_run_timestamp", last_s, (entry.name,))
