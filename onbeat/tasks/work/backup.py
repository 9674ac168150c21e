"""Makes a backup below ONBEAT_BACKUP_ROOT, each night where the operator asks for it.

onbeat/backup/nightly.py says what it is, and which ones stay.
"""

from __future__ import annotations

from broker.connection.client import Broker
from broker.task_store import Attempt, TaskStore
from contracts.errors import NotFound
from contracts.settings import StackSettings
from contracts.tasks.records import BackupMade, TaskResult
from onbeat.backup.nightly import back_up
from onbeat.tasks.attempt import Progress


def backup(broker: Broker, settings: StackSettings, attempt: Attempt, progress: Progress) -> TaskResult:
    """Makes the backup of this task, unless an earlier attempt has made it. Raises as `back_up`."""
    store = TaskStore(broker)

    def is_open(task_id: str) -> bool:
        try:
            return not store.status(task_id).state.is_final
        except NotFound:
            return False

    path, record = back_up(settings, attempt.task_id, attempt.turn, is_open)
    progress.add(files=len(record.files), num_bytes=record.num_bytes)
    result = BackupMade(
        directory=str(path), num_jobs=len(record.jobs), num_bytes=record.num_bytes, has_redis=record.has_redis
    )
    return TaskResult(backup=result)
