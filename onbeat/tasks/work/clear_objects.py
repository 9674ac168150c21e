"""Removes objects of the object store that no job names, once a day (onbeat/weights/objects/left_objects.py)."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.removals import Removals
from broker.task_store import Attempt
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.tasks.attempt import Progress
from onbeat.weights.objects.left_objects import clear_left


def clear_objects(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Asks Redis which jobs there are, and removes the objects of others. Raises as `clear_left`."""

    def known_jobs() -> set[str]:
        notes = Removals(broker).notes()
        jobs = JobStore(broker)
        return {*jobs.job_ids(), *jobs.active_jobs(), *notes.removals, *notes.unreadable}

    if not settings.objects:
        return TaskResult(num_jobs=0, num_bytes=0)
    num_jobs, num_bytes = clear_left(settings, known_jobs, lambda num_bytes: progress.add(files=1, num_bytes=num_bytes))
    return TaskResult(num_jobs=num_jobs, num_bytes=num_bytes)
