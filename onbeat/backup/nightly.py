"""The backups that a stack makes itself: one folder each in the folder of backups, the newest ones of which stay.

    .task-0123456789ab.1.part/   ─▶  20261129T030004Z-0123456789ab/   a task's work, and its backup once it is whole

A name has the time of the backup and its task: a task that begins again finds its own. Nothing else in the folder is
touched.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.backup.folder import MARK, REDIS, Backup, errors_in_words, make_backup
from onbeat.base.process.folders import make_private, sync

NAME = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}")
"""The folder of a backup."""
PART = re.compile(r"\.task-(?P<task>[0-9a-f]{12})\.[0-9]{1,9}\.part")
"""The folder that one attempt of a task writes to."""
GOING = re.compile(r"\.[0-9]{8}T[0-9]{6}Z-[0-9a-f]{12}\.removed")
"""A backup that is being removed."""

log = logging.getLogger(__name__)


def back_up(
    settings: StackSettings, task_id: str, turn: int, is_open: Callable[[str], bool] = lambda task_id: False
) -> tuple[Path, Backup]:
    """Makes a backup of a stack below settings.backup_root, and removes the older ones that are too many.

    Args:
        settings: The stack's.
        task_id: The task; a backup that it has made already is answered.
        turn: The number of the attempt, which no other one has.
        is_open: Asks whether another task goes on, whose unfinished folder stays.

    Returns:
        The folder, and what it holds.

    Raises:
        InvalidInput: No folder of backups is named.
        Unavailable: Redis' data aren't there, or don't hold still.
        OnbeatError: Something can't be read or written.
    """
    if not settings.backup_root:
        raise InvalidInput("is not set", field="ONBEAT_BACKUP_ROOT", cure="name the folder of backups")
    folder = Path(settings.backup_root).resolve()
    with errors_in_words():
        make_private_once(folder)
        clear_parts(folder, task_id, is_open)
        hex_id = task_id.removeprefix("task-")
        for path in backups_in(folder):
            if path.name.endswith(f"-{hex_id}"):
                return path, read_mark(path)
        part = folder / f".{task_id}.{turn}.part"
        try:
            record = _copied(settings, part)
            target = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(record.at_s))}-{hex_id}"
            part.rename(target)
            sync(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        remove_older(folder, settings.backups_kept)
    return target, record


def _copied(settings: StackSettings, part: Path) -> Backup:
    """Makes the backup in the folder of an attempt, with Redis' data where the stack's are on this host."""
    root = settings.run_root_path
    redis_folder = None
    if settings.redis_folder:
        redis_folder = Path(settings.redis_folder).resolve()
    with_redis = redis_folder is not None or (root / REDIS).is_dir()
    return make_backup(root, part, with_redis=with_redis, redis_folder=redis_folder)


def make_private_once(folder: Path) -> None:
    """Makes the folder for its owner alone; one that is there stays as the operator has made it."""
    if not folder.is_dir():
        make_private(folder)


def backups_in(folder: Path) -> list[Path]:
    """Returns the whole backups of a folder, oldest first."""
    names = sorted(entry.name for entry in os.scandir(folder) if NAME.fullmatch(entry.name))
    return [folder / name for name in names if (folder / name / MARK).is_file()]


def read_mark(path: Path) -> Backup:
    """Reads what a backup says that it holds. Raises InvalidInput and OSError."""
    return decode_json(read_plain(path / MARK), Backup)


def clear_parts(folder: Path, task_id: str, is_open: Callable[[str], bool]) -> None:
    """Removes what ended attempts have left: earlier ones of this task, and those of tasks that are over."""
    for entry in list(os.scandir(folder)):
        part = PART.fullmatch(entry.name)
        other = f"task-{part['task']}" if part else ""
        if GOING.fullmatch(entry.name) or (part and (other == task_id or not is_open(other))):
            shutil.rmtree(entry.path, ignore_errors=True)


def remove_older(folder: Path, num_kept: int) -> None:
    """Removes all backups but the newest ones. Raises OSError."""
    for path in backups_in(folder)[:-num_kept]:
        going = path.with_name(f".{path.name}.removed")
        path.rename(going)
        shutil.rmtree(going)
        log.info("backup %s is removed: the newest %d are kept", path, num_kept)
