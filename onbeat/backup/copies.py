"""Copies files that processes write meanwhile, so that what is copied belongs together.

    redis/          a prefix of its append-only file: Redis as it was at one moment, the oldest of the copy
    JOB/…           checkpoints, versions and recorded batches, which are whole once they have their names
    JOB/*.jsonl     afterwards, and the audit chain last: each checkpoint that was copied follows from it

So Redis is never newer than the run folders, and a trainer gives it back what it lacks (decision 20).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from contracts.encoding.json_lines import read_plain
from contracts.encoding.names import SEGMENT
from contracts.errors import InvalidInput, Unavailable
from contracts.run_folder import RunFolder
from onbeat.base.process.folders import make_private
from onbeat.base.process.waiting import Waiting

APPEND_ONLY, MANIFEST, SEAL = "appendonlydir", "appendonly.aof.manifest", "seal"
"""Contents of a folder of Redis' data: the folder of its append-only file, which has a manifest, and the seal."""
NUMBERED = ("checkpoints", "weights", "rollouts", "trainer_state")
"""Folders of a run whose folders are whole once they have their names, and may vanish once others have theirs."""
TRIES_S = 60.0
"""How long files are looked at again that vanished while they were copied."""
POLL_S = 0.05
CHUNK = 2**20
MAX_MANIFEST_BYTES = 2**20
"""Redis writes a line of some sixty bytes for each of a few files."""


def copy_redis(source: Path, target: Path) -> None:
    """Copies an embedded server's data and its seal. Raises Unavailable where it rewrites its file again and again."""
    if not (source / APPEND_ONLY / MANIFEST).is_file():
        raise Unavailable(f"{source} holds no server's data", field="--run-dir", cure="name the folder of a stack")
    waiting = Waiting("Redis to leave its append-only file as it is", deadline_s=TRIES_S)
    while not _copied_redis(source, target):
        waiting.poke()
        time.sleep(POLL_S)


def _copied_redis(source: Path, target: Path) -> bool:
    """Copies the files that the manifest names. Returns False where a rewrite has replaced one of them meanwhile."""
    named = (source / APPEND_ONLY / MANIFEST).read_bytes()
    if (target / APPEND_ONLY).exists():
        shutil.rmtree(target / APPEND_ONLY)
    make_private(target / APPEND_ONLY)
    names = names_of(named)
    try:
        for name in names:  # in the manifest's order: the newest one, which alone is written, comes last
            _copy_file(source / APPEND_ONLY / name, target / APPEND_ONLY / name)
    except FileNotFoundError:
        return False
    (target / APPEND_ONLY / MANIFEST).write_bytes(named)
    _copy_file(source / SEAL, target / SEAL)
    return (source / APPEND_ONLY / MANIFEST).read_bytes() == named


def names_of(manifest: bytes) -> list[str]:
    """Returns the files that a manifest of Redis names, oldest first. Raises InvalidInput for a name that is a path."""
    lines = [line.split() for line in manifest.decode(errors="replace").splitlines() if line.startswith("file ")]
    names = [words[1] if len(words) > 1 else "" for words in lines]
    for name in names:
        if not re.fullmatch(SEGMENT, name):
            raise InvalidInput(f"{MANIFEST} names `{name[:200]!a}`, which is no name of a file", field=MANIFEST)
    return names


def check_redis_names(folder: Path) -> None:
    """Checks the manifest of a server's data in a backup, whose server will open what it names. Raises InvalidInput."""
    try:
        names_of(read_plain(folder / APPEND_ONLY / MANIFEST, max_bytes=MAX_MANIFEST_BYTES))
    except OSError as error:
        problem = f"{MANIFEST} can't be read: {error.strerror}"
        raise InvalidInput(problem, field="DIR", cure="take another backup") from error


def copy_run(source: RunFolder, target: Path) -> None:
    """Copies one job's folder."""
    make_private(target)
    for name in NUMBERED:
        if (source.path / name).is_dir():
            _copy_numbered(source.path / name, target / name)
    entries = sorted(os.scandir(source.path), key=lambda entry: entry.name)
    rest = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
    for entry in sorted(rest, key=lambda entry: entry.name == source.chain.name):
        _copy_file(Path(entry.path), target / entry.name)


def _copy_numbered(source: Path, target: Path) -> None:
    """Copies the folders in a folder, until a look finds none that wasn't copied: one that vanished has a successor."""
    make_private(target)
    waiting = Waiting(f"{source} to hold still", deadline_s=TRIES_S)
    while new := [entry.name for entry in _entries(source) if not (target / entry.name).exists()]:
        for name in sorted(new):
            try:
                copy_tree(source / name, target / name)
            except FileNotFoundError:  # removed meanwhile: nothing of it is kept
                shutil.rmtree(target / name, ignore_errors=True)
        waiting.poke()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Returns the finished entries of a folder; `.NAME.…` is being written."""
    return [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]


def copy_tree(source: Path, target: Path) -> None:
    """Copies files and folders; links and pipes, which code of a job may have put there, lead nowhere from a copy."""
    mode = source.lstat().st_mode
    if stat.S_ISREG(mode):
        _copy_file(source, target)
    elif stat.S_ISDIR(mode):
        make_private(target)
        for entry in os.scandir(source):
            copy_tree(Path(entry.path), target / entry.name)


def _copy_file(source: Path, target: Path) -> None:
    with open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW), "rb") as read:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as written:
            shutil.copyfileobj(read, written, CHUNK)
            written.flush()
            os.fsync(written.fileno())


def files_below(folder: Path) -> Iterator[Path]:
    """Every file, by its name."""
    for parent, _, names in sorted(os.walk(folder)):
        yield from (Path(parent, name) for name in sorted(names))


def entries_below(folder: Path) -> Iterator[Path]:
    """Every file, and every link to a folder, which `files_below` passes over."""
    for parent, folders, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)
        yield from (Path(parent, name) for name in folders if Path(parent, name).is_symlink())
