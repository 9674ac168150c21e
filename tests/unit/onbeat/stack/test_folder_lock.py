"""The lock of a run folder: one stack at a time, and what a killed one left is waited for."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onbeat.stack.folder_lock as folder_lock
from contracts.errors import Conflict
from onbeat.stack.folder_lock import FILE_NAME, FolderLock

HOLDS = """
import subprocess, sys, time
from pathlib import Path
from onbeat.stack.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0, pass_fds=lock.shared_with)
print(server.pid, flush=True)
time.sleep(600)
"""
"""A stack with a server: the server ends when its standard input does."""


def test_the_second_is_told_the_folder_and_the_holder_and_the_next_one_gets_it(tmp_path: Path) -> None:
    lock, second = FolderLock(tmp_path), FolderLock(tmp_path)
    lock.take()
    with pytest.raises(Conflict, match=rf"^--run-dir: {tmp_path}: process {os.getpid()} runs a stack there"):
        second.take()
    second.release()
    lock.release()
    lock.release()
    second.take()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0
    second.release()


def test_a_killed_holder_s_server_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin
    assert holder.stdout
    with holder.stdin, holder.stdout:
        server = int(holder.stdout.readline())
        with pytest.raises(Conflict, match=rf"process {holder.pid} runs a stack there"):
            FolderLock(tmp_path).take()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        monkeypatch.setattr(folder_lock, "ORPHAN_GRACE_S", 0.0)
        with pytest.raises(Conflict, match=rf"process {holder.pid} is dead, and its server still runs there"):
            FolderLock(tmp_path).take()
        monkeypatch.setattr(folder_lock, "ORPHAN_GRACE_S", 60.0)
        os.kill(server, signal.SIGTERM)
        lock = FolderLock(tmp_path)
        lock.take()
        lock.release()


def test_a_number_that_another_process_has_by_now_is_no_holder(tmp_path: Path) -> None:
    with (tmp_path / FILE_NAME).open("w+") as file:
        file.write(f'{{"pid": {os.getpid()}, "started_s": 1.0}}')
        file.flush()
        FolderLock(tmp_path).take()


@pytest.mark.parametrize("text", ["", "nonsense"])
def test_a_lock_whose_file_says_nothing_is_a_lock_all_the_same(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "ORPHAN_GRACE_S", 0.0)
    with (tmp_path / FILE_NAME).open("w+") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another process runs a stack there"):
            FolderLock(tmp_path).take()


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = FolderLock(tmp_path)
    lock.take()
    lock.release()
    assert "can't be locked on this file system" in caplog.text
