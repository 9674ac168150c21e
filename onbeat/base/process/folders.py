"""Folders and files that only their owner may open: what is in them, weights, prompts and keys, needs no mode of its
own."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from contracts.errors import InvalidInput, OnbeatError

PRIVATE = 0o700


def make_private(folder: Path) -> None:
    """Makes a folder that is ours, and takes others' rights off it where it was there already. Raises OSError."""
    make_missing(folder)
    state = folder.stat()
    if state.st_uid == os.geteuid() and stat.S_IMODE(state.st_mode) & 0o077:
        folder.chmod(PRIVATE)


def is_private(folder: Path) -> bool:
    """Returns True for a folder of ours, and no link to one, that other users may not enter. Raises OSError."""
    state = folder.lstat()
    is_closed = not stat.S_IMODE(state.st_mode) & 0o077
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and is_closed


def write_private(path: Path, text: str) -> None:
    """Writes a file that has mode 0600 from its first byte; an existing one is replaced."""
    path.unlink(missing_ok=True)
    with open(path, "x", opener=private) as file:
        file.write(text)


@contextlib.contextmanager
def written_whole(path: Path, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Opens a file that appears with all that is written inside, mode 0600, or not at all. Raises OSError.

    Args:
        path: The file.
        durable: True has the bytes on disk before the name is.
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


@contextlib.contextmanager
def usable(path: Path, *, to_be: str, cure: str = "free space there, or fix its permissions") -> Iterator[None]:
    """Turns an OSError of the block into an OnbeatError that names the path.

    Args:
        path: The file or folder.
        to_be: The use that failed, as "written".
        cure: The cure that the error names.
    """
    try:
        yield
    except OSError as error:
        raise OnbeatError(f"cannot be {to_be}: {error.strerror}", field=str(path), cure=cure) from error


@contextlib.contextmanager
def writable_run_dir() -> Iterator[None]:
    """Raises InvalidInput that names the flag of the run directory in the place of an OSError."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(str(error), field="--run-dir", cure="choose a folder that you can write to") from error


def private(path: str, flags: int) -> int:
    """Opens a file that this user alone may read: an opener for `open`."""
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
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=PRIVATE, exist_ok=True)
    folder.mkdir(exist_ok=True)
