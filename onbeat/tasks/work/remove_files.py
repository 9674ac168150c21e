"""Removes the files of jobs whose keys are gone, and old exports, once a minute."""

from __future__ import annotations

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.tasks.attempt import Progress
from onbeat.tasks.exports import remove_expired_exports
from onbeat.tasks.removal.file_remover import FileRemover


def remove_files(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Removes the files of the jobs that notes in Redis name, and exports whose time is over.

    What another such task, or a task `delete`, does at the same time does no harm: each step looks again.
    """
    num_jobs = FileRemover(broker, settings).remove_all(lambda: progress.add(files=1))
    remove_expired_exports(settings)
    return TaskResult(num_jobs=num_jobs)
