"""Removes the keys of ended jobs whose time in Redis is over, once their run folders hold all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from broker.connection.client import Broker
from broker.job_store import JobStore
from broker.task_store import Attempt
from contracts.errors import Conflict, ContractViolation, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.run_folder.run_files import run_files
from onbeat.tasks.attempt import Progress
from onbeat.tasks.removal.due_jobs import DueJob, due_jobs, is_put_aside

BRING_S = 5.0
"""Longest that a look at one job waits for a byte of what the store has of it."""

log = logging.getLogger(__name__)


def forget(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Forgets the jobs that are due."""
    return TaskResult(num_jobs=len(forget_due(broker, settings, lambda: progress.add(files=1))))


def forget_due(broker: Broker, settings: StackSettings, forgotten: Callable[[], None] = lambda: None) -> list[str]:
    """Removes the keys of each ended job that is due and whose run folder holds its chain.

    Args:
        broker: Of a role that may remove jobs.
        settings: Ages, and where run folders are.
        forgotten: Called after each.

    Returns:
        The ids of the jobs.

    Raises:
        Unavailable: Redis, or the object store, is away.
    """
    job_ids: list[str] = []
    for due in due_jobs(broker, settings):
        try:
            if not _stands_alone(broker, settings, due):
                continue
            JobStore(broker).remove(due.job_id, as_seen=(due.ended_s, due.num_records))
        except (Conflict, NotFound, ContractViolation) as error:
            log.info("%s is not forgotten: %s", due.job_id, error)
        else:
            log.info("Redis has forgotten %s: its audit chain is in its run folder", due.job_id)
            job_ids.append(due.job_id)
            forgotten()
    return job_ids


def _stands_alone(broker: Broker, settings: StackSettings, due: DueJob) -> bool:
    """Returns True where the run folder holds the chain and the status as they are; a job that trained nothing may have
    no folder.

    Read back here, and not believed: the chain that is removed exists nowhere else.
    """
    folder = RunFolder(settings.run_root_path, due.job_id)
    if due.num_records == 0 and not folder.path.exists():
        return True
    run_files(settings, folder, deadline_s=BRING_S).bring(below=folder.audit_aside.name)
    return is_put_aside(broker, folder, due)
