"""Removes trees of files for good: under a hidden name first, so that no reader sees half of one."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from contracts.errors import OnbeatError
from onbeat.base.process.crash_points import reach


def hidden_name(path: Path) -> Path:
    """Returns the path to which a folder goes that is being removed."""
    return path.with_name(f".{path.name}.removed")


def remove_tree(path: Path) -> bool:
    """Removes a folder, a file or a link, and what an earlier removal left of it; returns whether there was anything.

    Raises OnbeatError that names the path where the system refuses: a part of it may be gone then, under its hidden
    name, and another call goes on with the rest.
    """
    hidden = hidden_name(path)
    was_there = False
    try:
        # Links and a half-removed folder are something, too.
        while os.path.lexists(path) or os.path.lexists(hidden):
            was_there = True
            _remove(hidden)
            with contextlib.suppress(FileNotFoundError):  # another worker was faster
                path.rename(hidden)
                reach("tasks.removing_files")
                _remove(hidden)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OnbeatError(f"cannot be removed: {reason}", field=str(path), cure="remove it by hand") from error
    return was_there


def _remove(path: Path) -> None:
    """Removes a path, if it is there. `rmtree` opens each folder as one and no link (Python's own answer to races)."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
