"""Removes the files of one job whose keys are gone, as soon as a worker takes it.

A later task `remove_files` sees to what is left.
"""

from __future__ import annotations

from broker.connection.client import Broker
from broker.task_store import Attempt
from contracts.settings import StackSettings
from contracts.tasks.records import TaskResult
from onbeat.tasks.attempt import Progress
from onbeat.tasks.removal.file_remover import FileRemover


def delete(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Removes what the note of the job in Redis says, and nothing where there is none.

    So a task that runs again later removes nothing that came meanwhile: the note goes once the files have, and no other
    job ever has the same id.
    """
    is_noted = FileRemover(broker, settings).remove(attempt.arguments.job_id)
    progress.add(files=int(is_noted))
    return TaskResult(num_jobs=int(is_noted))
