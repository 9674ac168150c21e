"""Folders and files that only their owner may open: what is in them, weights, prompts and keys, needs no mode of its
own; and their removal for good, under a hidden name first, so that no reader sees half of one.

job-0123456789ab/  ─▶  .job-0123456789ab.removed/  ─▶  nothing

A removal that was killed is found again by that name. Links are removed, never followed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from contracts.errors import OnbeatError
from onbeat.process.crash_points import reach

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


def write_private(path: Path, text: str) -> None:
    """Writes a file that has mode 0600 from its first byte; an existing one is replaced."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=private) as file:
        file.write(text)


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """A file that is there with all that is written inside, mode 0600, or not at all. Raises OSError.

    durable: the bytes are on disk before the name is.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}")
    try:
        with open(part, "xb", opener=private) as file:
            yield file
        if durable:
            sync(part)
        part.rename(path)
        if durable:
            sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def private(path: str, flags: int) -> int:
    """An opener of files that this user alone may read."""
    return os.open(path, flags, 0o600)


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_missing(folder: Path) -> None:
    """Makes the folder and each missing one above it for its owner alone; `mkdir(parents=True)` leaves those open.

    What is there already stays as its owner has it. Raises OSError.
    """
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=PRIVATE, exist_ok=True)
    folder.mkdir(exist_ok=True)


def hidden_name(path: Path) -> Path:
    """Where a folder goes that is being removed."""
    return path.with_name(f".{path.name}.removed")


def remove_tree(path: Path) -> bool:
    """Removes a folder, a file or a link, and what an earlier removal left of it; whether there was anything.

    Raises OnbeatError that names the path where the system refuses: a part of it may be gone then, under its hidden
    name, and another call goes on with the rest.
    """
    hidden, found = hidden_name(path), False
    try:
        # Links and a half-removed folder are something, too.
        while os.path.lexists(path) or os.path.lexists(hidden):
            found = True
            _remove(hidden)
            with contextlib.suppress(FileNotFoundError):  # another consumer was faster
                path.rename(hidden)
                reach("consumer.removing_files")
                _remove(hidden)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OnbeatError(f"cannot be removed: {reason}", field=str(path), cure="remove it by hand") from error
    return found


def _remove(path: Path) -> None:
    """What is not there already. `rmtree` opens each folder as one and no link (Python's own answer to races)."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
