"""A backup of a stack: how its folder is made, checked, and copied back.

backup.json     what it holds and the digest of each file; written last, so that a folder without it is no backup
redis/          data of Redis, of a moment before that of the run folders
inputs/         files that jobs of programs were given
JOB/            a run folder each
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contracts.encoding.digests import file_digest
from contracts.encoding.json_lines import read_plain
from contracts.encoding.names import MADE_HERE, JobFolder
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import Conflict, InvalidInput, OnbeatError
from contracts.run_folder import RunFolder
from onbeat.backup.copies import (
    APPEND_ONLY,
    SEAL,
    check_redis_names,
    copy_redis,
    copy_run,
    copy_tree,
    entries_below,
    files_below,
)
from onbeat.base.process.folders import make_private, sync

MARK = "backup.json"
REDIS, INPUTS = "redis", "inputs"


class Backup(Record, frozen=True, kw_only=True):
    """backup.json, which is written last: a folder without it is no backup."""

    at_s: float
    """Unix time of its Redis; the run folders are a little newer."""
    has_redis: bool
    jobs: tuple[JobFolder, ...]
    """Each is a folder of the backup, and will be one of the run root."""
    num_bytes: int
    files: dict[str, str]
    """Path → BLAKE3."""


def make_backup(root: Path, directory: Path, *, with_redis: bool = True, redis_folder: Path | None = None) -> Backup:
    """Copies a stack into a folder that is empty, or not there.

    Redis comes first: what is newer in the run folders a trainer gives it back, and not the other way round.

    Args:
        root: The run root.
        directory: The folder of the backup.
        with_redis: True copies the data of Redis, too.
        redis_folder: Folder of these data; None takes `redis` in the run root.

    Raises:
        Unavailable: There are no data of Redis, or Redis rewrites its file again and again.
        OSError: Something can't be read or written.
    """
    make_private(directory)
    at_s = time.time()
    if with_redis:
        copy_redis(redis_folder or root / REDIS, directory / REDIS)
    if (root / INPUTS).is_dir():
        copy_tree(root / INPUTS, directory / INPUTS)
    job_ids = sorted(entry.name for entry in os.scandir(root) if MADE_HERE.fullmatch(entry.name) and entry.is_dir())
    for job_id in list(job_ids):
        try:
            copy_run(RunFolder(root, job_id), directory / job_id)
        except FileNotFoundError:
            if (root / job_id).is_dir():
                raise
            shutil.rmtree(directory / job_id, ignore_errors=True)  # it was deleted meanwhile
            job_ids.remove(job_id)
    paths = list(files_below(directory))
    record = Backup(
        at_s=at_s,
        has_redis=with_redis,
        jobs=tuple(job_ids),
        num_bytes=sum(path.stat().st_size for path in paths),
        files={path.relative_to(directory).as_posix(): file_digest(path) for path in paths},
    )
    for folder in {path.parent for path in paths}:
        sync(folder)
    (directory / MARK).write_bytes(encode_json(record))
    sync(directory)
    return record


def read_backup(directory: Path) -> Backup:
    """Reads a backup's record and checks each of its files.

    Raises InvalidInput for a folder that is no backup, and for a file that is missing, changed or no plain file.

    A backup may be of another hand: names in it that lead out of it, links and pipes are refused before one is opened.
    """
    try:
        record = decode_json(read_plain(directory / MARK), Backup)
    except OSError as error:
        raise InvalidInput(
            f"{directory} is no backup, or one that was not finished: {MARK} {error.strerror or error}", field="DIR"
        ) from error
    except InvalidInput as error:
        raise InvalidInput(f"{MARK} is damaged: {error}", field="DIR", cure="take another backup") from error
    paths = list(entries_below(directory))
    if odd_paths := [path for path in paths if not stat.S_ISREG(path.lstat().st_mode)]:
        name = odd_paths[0].relative_to(directory).as_posix()
        raise InvalidInput(f"{name} is no plain file", field="DIR", cure="take another backup")
    there = {path.relative_to(directory).as_posix() for path in paths} - {MARK}
    if odd := sorted(there ^ record.files.keys()):
        raise InvalidInput(f"{odd[0]} is missing, or was added", field="DIR", cure="take another backup")
    for name, digest in record.files.items():
        if file_digest(directory / name) != digest:
            raise InvalidInput(f"{name} is damaged", field="DIR", cure="take another backup")
    if record.has_redis:
        check_redis_names(directory / REDIS)
    return record


def bring_back(directory: Path, record: Backup, root: Path, *, redis_folder: Path | None = None) -> None:
    """Copies a backup that `read_backup` has checked into a run root.

    Args:
        directory: The folder of the backup.
        record: Its record.
        root: The run root.
        redis_folder: Folder for Redis' data, which may exist and be empty; None takes `redis` in the run root.

    Raises:
        Conflict: A run, or data of Redis, would be replaced.
    """
    for name in record.jobs:
        if (root / name).exists():
            raise Conflict(f"{root / name} is there already", field="--run-dir", cure="choose a new folder")
    if record.has_redis:
        _check_free_for_redis(root, redis_folder)
    targets = {name: root / name for name in (*record.jobs, INPUTS)} | {REDIS: redis_folder or root / REDIS}
    for name, target in targets.items():
        if (directory / name).is_dir():
            copy_tree(directory / name, target)


def _check_free_for_redis(root: Path, redis_folder: Path | None) -> None:
    """Raises Conflict where the folder for Redis' data holds some already."""
    if redis_folder is None:
        paths, field = [root / REDIS], "--run-dir"
    else:
        paths, field = [redis_folder / APPEND_ONLY, redis_folder / SEAL], "--redis-dir"
    for path in paths:
        if path.exists():
            raise Conflict(f"{path} is there already", field=field, cure="choose a new folder")


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Raises an error of the file system as an OnbeatError, which a command prints as one line."""
    try:
        yield
    except OSError as error:
        raise OnbeatError(str(error), cure="correct it, and begin with a new folder") from error
