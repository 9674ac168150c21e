"""Folders that only their owner may enter: what is in them, weights, prompts and keys, needs no mode of its own."""

from __future__ import annotations

import os
import stat
from pathlib import Path

PRIVATE = 0o700


def make_private(folder: Path) -> None:
    """Makes a folder that is ours, and takes others' rights off it where it was there already. Raises OSError."""
    make_missing(folder)
    found = folder.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(PRIVATE)


def is_private(folder: Path) -> bool:
    """Whether it is a folder of ours, no link to one, that other users may not enter. Raises OSError."""
    found = folder.lstat()
    is_closed = not stat.S_IMODE(found.st_mode) & 0o077
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and is_closed


def make_missing(folder: Path) -> None:
    """Makes the folder and each missing one above it for its owner alone; `mkdir(parents=True)` leaves those open.

    What is there already stays as its owner has it. Raises OSError.
    """
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=PRIVATE, exist_ok=True)
    folder.mkdir(exist_ok=True)
