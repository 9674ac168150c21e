"""`onbeat backup` and `onbeat restore`."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

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
from onbeat.commands import options
from onbeat.stack.access import run_root_from
from onbeat.stack.folder_lock import FolderLock
from onbeat.terminal.output import tell
from onbeat.terminal.words import plural, size

MARK = "backup.json"
REDIS, INPUTS = "redis", "inputs"
Place = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the backup.")]
RedisFolder = Annotated[
    Path | None,
    typer.Option(
        "--redis-dir",
        metavar="DIR",
        envvar="ONBEAT_REDIS_FOLDER",
        help="Folder of Redis' data, where it isn't `redis` in the run folder: a volume of docker compose.",
    ),
]


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


def backup(
    directory: Place,
    without_redis: Annotated[
        bool, typer.Option("--without-redis", help="Copy run folders alone: your own server was backed up before.")
    ] = False,
    redis_dir: RedisFolder = None,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Copy a stack's Redis and run folders, also while jobs run: `onbeat restore` makes a stack of it that goes on."""
    root = run_root_from(os.environ, run_dir)
    if not root.is_dir():
        raise InvalidInput(f"there is no folder {root}", field="--run-dir", cure="name the folder of a stack")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(f"{directory} holds something", field="DIR", cure="choose a new folder")
    if not without_redis and not (redis_dir or root / REDIS).is_dir():
        raise InvalidInput(
            f"there is no folder {redis_dir}" if redis_dir else f"{root} has no Redis of its own",
            field="--redis-dir" if redis_dir else "--run-dir",
            cure="name its folder with --redis-dir, or back up the server that ONBEAT_REDIS_URL names first, then give "
            "--without-redis",
        )
    with errors_in_words():
        made = make_backup(root, directory, with_redis=not without_redis, redis_folder=redis_dir)
    said = f"{plural(len(made.jobs), 'job')}, {size(made.num_bytes)} in {directory}   onbeat restore {directory}"
    tell({"directory": str(directory), "jobs": made.jobs, "num_bytes": made.num_bytes}, said, json_output=json_output)


def restore(
    directory: Place,
    redis_dir: RedisFolder = None,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Make a run folder of a backup; `onbeat up` there goes on with its jobs. It replaces nothing."""
    root = run_root_from(os.environ, run_dir)
    found = read_backup(directory)
    with errors_in_words():
        make_private(root)
        lock = FolderLock(root)
        lock.take()
        try:
            bring_back(directory, found, root, redis_folder=redis_dir)
        finally:
            lock.release()
    said = f"{plural(len(found.jobs), 'job')}, {size(found.num_bytes)} in {root}   onbeat up --run-dir {root}"
    tell({"run_root": str(root), "jobs": found.jobs, "num_bytes": found.num_bytes}, said, json_output=json_output)


def make_backup(root: Path, directory: Path, *, with_redis: bool = True, redis_folder: Path | None = None) -> Backup:
    """Copies a stack into a folder that is empty, or not there.

    Redis comes first: what is newer in the run folders a trainer gives it back, and not the other way round.

    Args:
        root: The run root.
        directory: The folder of the backup.
        with_redis: Whether Redis' data is copied, too.
        redis_folder: Where they are; None: in the run root.

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
    made = Backup(
        at_s=at_s,
        has_redis=with_redis,
        jobs=tuple(job_ids),
        num_bytes=sum(path.stat().st_size for path in paths),
        files={path.relative_to(directory).as_posix(): file_digest(path) for path in paths},
    )
    for folder in {path.parent for path in paths}:
        sync(folder)
    (directory / MARK).write_bytes(encode_json(made))
    sync(directory)
    return made


def read_backup(directory: Path) -> Backup:
    """Raises InvalidInput for what is no backup, and for one with a file that is missing, changed or strange.

    A backup may be of another hand: names in it that lead out of it, links and pipes are refused before one is opened.
    """
    try:
        found = decode_json(read_plain(directory / MARK), Backup)
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
    if odd := sorted(there ^ found.files.keys()):
        raise InvalidInput(f"{odd[0]} is missing, or was added", field="DIR", cure="take another backup")
    for name, digest in found.files.items():
        if file_digest(directory / name) != digest:
            raise InvalidInput(f"{name} is damaged", field="DIR", cure="take another backup")
    if found.has_redis:
        check_redis_names(directory / REDIS)
    return found


def bring_back(directory: Path, found: Backup, root: Path, *, redis_folder: Path | None = None) -> None:
    """Copies what is whole. Raises Conflict where a run, or data of Redis, would be replaced.

    redis_folder: where Redis' data are to be, a folder that may be there and hold none; None: `redis` in the run root.
    """
    for name in found.jobs:
        if (root / name).exists():
            raise Conflict(f"{root / name} is there already", field="--run-dir", cure="choose a new folder")
    taken = [root / REDIS] if redis_folder is None else [redis_folder / name for name in (APPEND_ONLY, SEAL)]
    for path in taken if found.has_redis else []:
        if path.exists():
            field = "--run-dir" if redis_folder is None else "--redis-dir"
            raise Conflict(f"{path} is there already", field=field, cure="choose a new folder")
    targets = {name: root / name for name in (*found.jobs, INPUTS)} | {REDIS: redis_folder or root / REDIS}
    for name, target in targets.items():
        if (directory / name).is_dir():
            copy_tree(directory / name, target)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """An error of the file system becomes one line."""
    try:
        yield
    except OSError as error:
        raise OnbeatError(str(error), cure="correct it, and begin with a new folder") from error
