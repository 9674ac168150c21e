"""`onbeat backup` and `onbeat restore`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import Conflict, InvalidInput
from onbeat.backup.folder import REDIS, bring_back, errors_in_words, make_backup, read_backup
from onbeat.base.process.folders import make_private
from onbeat.commands import options
from onbeat.stack.access import run_root_from
from onbeat.stack.folder_lock import FolderLock
from onbeat.terminal.output import tell
from onbeat.terminal.words import plural, size

BackupFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the backup.")]
RedisFolder = Annotated[
    Path | None,
    typer.Option(
        "--redis-dir",
        metavar="DIR",
        envvar="ONBEAT_REDIS_FOLDER",
        help="Folder of Redis' data, where it isn't `redis` in the run folder: a volume of docker compose.",
    ),
]


def backup(
    directory: BackupFolder,
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
        raise Conflict(f"{directory} is not empty", field="DIR", cure="choose a new folder")
    if not without_redis and not (redis_dir or root / REDIS).is_dir():
        raise InvalidInput(
            f"there is no folder {redis_dir}" if redis_dir else f"{root} has no Redis of its own",
            field="--redis-dir" if redis_dir else "--run-dir",
            cure="name its folder with --redis-dir, or back up the server that ONBEAT_REDIS_URL names first, then give "
            "--without-redis",
        )
    with errors_in_words():
        record = make_backup(root, directory, with_redis=not without_redis, redis_folder=redis_dir)
    line = f"{plural(len(record.jobs), 'job')}, {size(record.num_bytes)} in {directory}   onbeat restore {directory}"
    report = {"directory": str(directory), "jobs": record.jobs, "num_bytes": record.num_bytes}
    tell(report, line, json_output=json_output)


def restore(
    directory: BackupFolder,
    redis_dir: RedisFolder = None,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Make a run folder of a backup; `onbeat up` there goes on with its jobs. It replaces nothing."""
    root = run_root_from(os.environ, run_dir)
    record = read_backup(directory)
    with errors_in_words():
        make_private(root)
        lock = FolderLock(root)
        lock.take()
        try:
            bring_back(directory, record, root, redis_folder=redis_dir)
        finally:
            lock.release()
    line = f"{plural(len(record.jobs), 'job')}, {size(record.num_bytes)} in {root}   onbeat up --run-dir {root}"
    report = {"run_root": str(root), "jobs": record.jobs, "num_bytes": record.num_bytes}
    tell(report, line, json_output=json_output)
