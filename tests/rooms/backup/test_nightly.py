"""A stack makes backups itself: each is whole or not there, the newest stay, and a Redis elsewhere is one of them."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from msgspec.structs import replace
from redis.exceptions import BusyLoadingError, ConnectionError

from broker.connection.script_texts import write_texts
from contracts.errors import Conflict, InvalidInput, OnbeatError, Unavailable
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.backup import folder as backup_folder
from onbeat.backup import nightly
from onbeat.backup.copies import APPEND_ONLY, SEAL
from onbeat.backup.folder import MARK, bring_back, make_backup, read_backup
from onbeat.backup.nightly import back_up, backups_in, remove_older
from onbeat.cli import run
from onbeat.stack.redis import EmbeddedRedis, find_server_binary
from tests.until import until

JOB = "job-0123456789ab"
TASK, OTHER_TASK = "task-0123456789ab", "task-0123456789cd"
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    """A run root with a job, a folder of backups, and Redis' data in a folder of their own."""
    folder = RunFolder(tmp_path / "runs", JOB)
    (folder.checkpoints / "i000003").mkdir(parents=True)
    (folder.checkpoints / "i000003" / "state.json").write_text("{}")
    folder.chain.write_text("{}\n")
    with EmbeddedRedis(tmp_path / "volume") as server:
        redis.Redis.from_url(server.url).set("onbeat:a-key", "a value")
        server.child.stop(grace_s=10.0)
    return StackSettings(
        run_root=str(tmp_path / "runs"),
        backup_root=str(tmp_path / "backups"),
        redis_folder=str(tmp_path / "volume"),
    )


def names_in(settings: StackSettings) -> list[str]:
    return sorted(os.listdir(settings.backup_root))


def test_a_backup_has_the_redis_of_its_own_folder_and_is_found_again_by_its_task(settings: StackSettings) -> None:
    path, made = back_up(settings, TASK, 1)
    assert nightly.NAME.fullmatch(path.name)
    assert path.name.endswith("-0123456789ab")
    assert (made.has_redis, made.jobs) == (True, (JOB,))
    assert read_backup(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert names_in(settings) == [path.name]
    again, same = back_up(settings, TASK, 2)
    assert (again, same) == (path, made), "the task that is begun again has its backup"
    assert back_up(settings, OTHER_TASK, 1)[0] != path


def test_the_newest_stay_and_nothing_else_in_the_folder_is_touched(settings: StackSettings) -> None:
    root = Path(settings.backup_root)
    for name in ("photos", "20260101T030000Z-notahexnumber", "20260101T030000Z-00000000000a"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("mine")
    whole = [root / f"202601{day:02d}T030000Z-0000000000{day:02d}" for day in range(2, 10)]
    for path in whole:
        path.mkdir()
        (path / MARK).write_text("{}")
    path, _ = back_up(replace(settings, backups_kept=3), TASK, 1)
    assert backups_in(root) == [*whole[-2:], path]
    for name in ("photos", "20260101T030000Z-notahexnumber", "20260101T030000Z-00000000000a"):
        assert (root / name / "file").read_text() == "mine", "a folder without its mark is no backup of ours"


def test_a_removal_of_an_old_one_that_was_killed_is_finished_by_the_next(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(settings.backup_root)
    for day in (1, 2):
        folder = root / f"2026010{day}T030000Z-00000000000{day}"
        folder.mkdir(parents=True)
        (folder / MARK).write_text("{}")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nightly.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_older(root, 1)
    monkeypatch.undo()
    assert names_in(settings) == [".20260101T030000Z-000000000001.removed", "20260102T030000Z-000000000002"]
    path, _ = back_up(settings, TASK, 1)
    assert names_in(settings) == ["20260102T030000Z-000000000002", path.name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_ends_in_the_middle_leaves_no_backup_and_no_files(
    error: BaseException, settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(backup_folder, "copy_run", fails)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OnbeatError):
        back_up(settings, TASK, 1)
    assert names_in(settings) == []


def test_what_a_killed_attempt_has_left_goes_and_what_another_task_writes_stays(settings: StackSettings) -> None:
    root = Path(settings.backup_root)
    over = "task-00000000000f"
    for name in (f".{TASK}.1.part", f".{OTHER_TASK}.1.part", f".{over}.4.part"):
        (root / name).mkdir(parents=True)
    path, _ = back_up(settings, TASK, 2, lambda task_id: task_id == OTHER_TASK)
    assert names_in(settings) == [f".{OTHER_TASK}.1.part", path.name]


def test_a_job_that_is_deleted_while_it_is_copied_is_left_out(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunFolder(settings.run_root_path, "job-0123456789cd")
    other.path.mkdir()
    other.chain.write_text("{}\n")
    copy_run = backup_folder.copy_run

    def deleted(source: RunFolder, target: Path) -> None:
        if source.job_id == JOB:
            shutil.rmtree(source.path)
        copy_run(source, target)

    monkeypatch.setattr(backup_folder, "copy_run", deleted)
    path, made = back_up(settings, TASK, 1)
    assert made.jobs == (other.job_id,)
    assert read_backup(path) == made


def test_a_backup_without_a_folder_for_it_or_without_the_data_that_it_names_is_refused(
    settings: StackSettings, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_BACKUP_ROOT"):
        back_up(StackSettings(), TASK, 1)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(Unavailable, match="holds no server's data"):
        back_up(replace(settings, redis_folder=str(empty)), TASK, 1)
    assert names_in(settings) == []


def test_a_stack_with_a_server_of_the_operators_backs_up_its_run_folders(settings: StackSettings) -> None:
    _, made = back_up(replace(settings, redis_folder=""), TASK, 1)
    assert (made.has_redis, made.jobs) == (False, (JOB,))


def test_a_backup_is_brought_back_to_a_volume_of_redis_that_is_empty_and_to_no_other(
    settings: StackSettings, tmp_path: Path
) -> None:
    path, made = back_up(settings, TASK, 1)
    volume, runs = tmp_path / "new-volume", tmp_path / "new runs"
    volume.mkdir()
    bring_back(path, made, runs, redis_folder=volume)
    assert sorted(os.listdir(volume)) == [APPEND_ONLY, SEAL]
    assert (runs / JOB / "checkpoints" / "i000003" / "state.json").is_file()
    assert not (runs / "redis").exists()
    for taken in (APPEND_ONLY, SEAL):
        with pytest.raises(Conflict, match=taken):
            bring_back(path, made, tmp_path / f"runs for {taken}", redis_folder=volume)
        shutil.rmtree(volume / taken) if (volume / taken).is_dir() else (volume / taken).unlink()
    bring_back(path, made, tmp_path / "runs again", redis_folder=volume)


def test_the_commands_back_up_and_restore_a_redis_that_is_elsewhere(
    settings: StackSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, volume = tmp_path / "copy", tmp_path / "new-volume"
    volume.mkdir()
    monkeypatch.setenv("ONBEAT_REDIS_FOLDER", settings.redis_folder)
    assert run(["backup", str(copy), "--run-dir", settings.run_root]) == 0
    monkeypatch.delenv("ONBEAT_REDIS_FOLDER")
    assert run(["restore", str(copy), "--run-dir", str(tmp_path / "new"), "--redis-dir", str(volume)]) == 0
    assert (volume / SEAL).read_bytes() == (Path(settings.redis_folder) / SEAL).read_bytes()
    assert (tmp_path / "new" / JOB / "chain.jsonl").is_file()
    assert run(["backup", str(tmp_path / "b"), "--run-dir", settings.run_root, "--redis-dir", "/nowhere"]) == 2


def started(folder: Path, data: Path) -> tuple[subprocess.Popen[bytes], redis.Redis]:
    """Starts Redis by the script of its image over a folder of data, in the place of `/data`; a connection to it."""
    share, binaries = folder / "share", folder / "bin"
    for made in (share, binaries):
        made.mkdir(parents=True, exist_ok=True)
    write_texts(share)
    address = folder / "s"
    configuration = (REPOSITORY / "deploy" / "redis.conf").read_text()
    edits: list[Callable[[str], str]] = [
        lambda text: text.replace("port 6379", f"port 0\nunixsocket {address}"),
        lambda text: text.replace("dir /data", f"dir {data}"),
        lambda text: text.replace("/tmp/users.acl", f"{folder}/users.acl"),
    ]
    for edit in edits:
        configuration = edit(configuration)
    (share / "redis.conf").write_text(configuration)
    (binaries / "redis-server").symlink_to(find_server_binary())
    client = binaries / "redis-cli"
    client.write_text('#!/bin/sh\ntest "$1" = ping && echo PONG || cat > /dev/null\n')
    client.chmod(0o755)
    script = (REPOSITORY / "deploy" / "redis-start.sh").read_text()
    for name in ("users.acl", "library.lua"):
        script = script.replace(f"/tmp/{name}", f"{folder}/{name}")
    script = script.replace("/data", str(data)).replace("/usr/share/onbeat", str(share))
    names = re.findall(r"\bREDIS_(?:\w+_)?PASSWORD\b", script)
    environment = {name: f"word-of-{name}" for name in names} | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    process = subprocess.Popen(["sh", "-c", script], env=environment)
    return process, redis.Redis(unix_socket_path=str(address), password="word-of-REDIS_PASSWORD")


def test_the_image_of_redis_finds_a_backup_that_was_brought_back_and_its_group_alone_may_read_the_data(
    settings: StackSettings, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As `docker compose` starts it: the script and the configuration of the image, over a volume."""
    volume = tmp_path / "new-volume"
    volume.mkdir()
    path, made = back_up(settings, TASK, 1)
    bring_back(path, made, tmp_path / "new runs", redis_folder=volume)
    process, client = started(tmp_path_factory.mktemp("r"), volume)
    try:

        def value() -> bytes | None:
            answer = client.get("onbeat:a-key")
            assert answer is None or isinstance(answer, bytes)
            return answer

        away = (ConnectionError, BusyLoadingError)
        assert until(value, "the value of before", deadline_s=60.0, away=away) == b"a value"
        client.bgrewriteaof()
        until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0, "a new file")  # type: ignore[index]
        client.set("onbeat:another-key", "x" * 100)
        modes = {stat.S_IMODE(each.stat().st_mode) for each in (volume / APPEND_ONLY).iterdir()}
        modes.add(stat.S_IMODE((volume / SEAL).stat().st_mode))
        assert modes == {0o640}
        assert stat.S_IMODE((volume / APPEND_ONLY).stat().st_mode) == 0o750
        again = make_backup(tmp_path / "new runs", tmp_path / "another", redis_folder=volume)
        assert again.has_redis
    finally:
        process.terminate()
        process.wait()


def test_a_volume_of_before_is_opened_to_the_group_too_and_to_no_other(
    settings: StackSettings, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One whose files an earlier image has made for their owner alone."""
    volume = Path(settings.redis_folder)
    (volume / APPEND_ONLY).chmod(0o700)
    for path in (volume / SEAL, *(volume / APPEND_ONLY).iterdir()):
        path.chmod(0o604)
    process, client = started(tmp_path_factory.mktemp("r"), volume)
    try:
        away = (ConnectionError, BusyLoadingError)
        until(client.ping, "Redis", deadline_s=60.0, away=away)
        assert {stat.S_IMODE(path.stat().st_mode) for path in (volume / APPEND_ONLY).iterdir()} == {0o640}
        assert stat.S_IMODE((volume / SEAL).stat().st_mode) == 0o640
    finally:
        process.terminate()
        process.wait()
