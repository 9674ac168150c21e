"""Removes the keys of ended jobs that have reached their age, and notes that their files are to go."""

from __future__ import annotations

import logging
from collections.abc import Callable

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.task_store import Attempt
from contracts.errors import Conflict, NotFound
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.tasks.attempt import Progress
from onbeat.tasks.removal.due_jobs import due_jobs

log = logging.getLogger(__name__)


def forget(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Forgets the jobs that are due."""
    return TaskResult(num_jobs=len(forget_due(broker, settings, lambda: progress.add(files=1))))


def forget_due(broker: Broker, settings: StackSettings, forgotten: Callable[[], None] = lambda: None) -> list[str]:
    """Removes the keys of each ended job that is due, and notes the removal of its files in the same step.

    A job from whose versions another one goes on that has not ended stays until that has ended.

    Args:
        broker: Of a role that may remove jobs.
        settings: The age at which ended jobs go.
        forgotten: Called after each.

    Returns:
        The ids of the jobs.

    Raises:
        Unavailable: Redis is away.
    """
    jobs = JobStore(broker)
    job_ids: list[str] = []
    for due in due_jobs(broker, settings):
        if jobs.forks_of(due.job_id):
            continue
        try:
            jobs.remove(due.job_id, seen_ended_s=due.ended_s)
        except (Conflict, NotFound) as error:
            log.info("%s is not forgotten: %s", due.job_id, error)
        else:
            log.info("%s is forgotten %g days after its end: its files go", due.job_id, settings.keep_ended_days)
            job_ids.append(due.job_id)
            forgotten()
    return job_ids
