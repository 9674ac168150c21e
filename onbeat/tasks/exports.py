"""Where exported models are until their clients have fetched them, and until when.

{run_root}/exports/{task_id}/
    v000005-0123456789abcdef/     version 5, whole, under the first letters of its digest
    attempt-2/ .attempt-2.…/      what an attempt is writing

Attempts of a task that run at the same time write to places of their own; the first that is done gives the folder its
name, and what the others wrote is the same, and goes. No job's id has the form of `exports`' entries, and nothing but
what is named here reads them.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import time
from pathlib import Path

from broker.task_store import check_task_id
from contracts.settings import StackSettings
from contracts.tasks.kinds import TASK_ID
from contracts.tasks.records import ExportedFiles

EXPORTS = "exports"
KEEP_S = 24 * 3600.0
"""How long an export is kept from its end on."""
LATE_S = 3600.0
"""A download that began before its end may go on for so long."""
UNFINISHED_S = 7 * 3600.0
"""No attempt lasts as long (worker.py): what it wrote and didn't name is a killed one's."""
FINISHED = re.compile(r"v[0-9]{6,18}-[0-9a-f]{16}")

log = logging.getLogger(__name__)


def exports_of(settings: StackSettings) -> Path:
    """Returns the folder of all exports of a run root."""
    return settings.run_root_path / EXPORTS


def place_of(settings: StackSettings, task_id: str) -> Path:
    """Returns the folder of one task. Raises NotFound for what is no task's id, and would be another path."""
    return exports_of(settings) / check_task_id(task_id)


def name_of(policy_version: int, weights_digest: str) -> str:
    """Returns the name of the folder that holds the version, below the place of its task."""
    return f"v{policy_version:06d}-{weights_digest[:16]}"


def folder_of(settings: StackSettings, task_id: str, exported: ExportedFiles) -> Path:
    """Returns the folder that the result of a task speaks of."""
    return place_of(settings, task_id) / name_of(exported.policy_version, exported.weights_digest)


def remove_expired_exports(settings: StackSettings) -> int:
    """Removes the exports that are over, and what killed attempts left; returns how many folders. Safe to repeat.

    What can't be removed is a line in the log.
    """
    root = exports_of(settings)
    num_removed = 0
    for name in _names(root):
        if TASK_ID.fullmatch(name) and _is_over(root / name, time.time()):
            num_removed += _removed(root / name)
    return num_removed


def _is_over(place: Path, now_s: float) -> bool:
    names = _names(place)
    # The place's own time is that of the rename by which the export got its name.
    if any(FINISHED.fullmatch(name) for name in names):
        return now_s - _changed_s(place) >= KEEP_S + LATE_S
    return now_s - max(map(_changed_s, [place, *(place / name for name in names)])) >= UNFINISHED_S


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _changed_s(path: Path) -> float:
    """Unix time of the last change of names in a folder; 0.0 where it is gone."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _removed(path: Path) -> bool:
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("could not remove the export %s: %s", path, error)
        return False
    log.info("the export %s is removed", path.name)
    return True
