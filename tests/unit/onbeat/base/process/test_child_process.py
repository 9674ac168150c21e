"""Which processes are ours: by number and start time, by mark, by descent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from onbeat.base.process import child_process
from onbeat.base.process.child_process import bound_log

SLEEP = (sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEP, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def test_a_stranger_with_the_number_of_a_dead_process_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    ours = psutil.Process(sleeper.pid)
    assert child_process.living([ours]) == {ours}
    # As it is after the number went round: the process that has it now was started at another time.
    ours._ident = (sleeper.pid, 1.0)
    ours._create_time = 1.0
    assert child_process.living([ours]) == set()
    child_process.kill_all([ours])
    assert sleeper.poll() is None


def test_a_zombie_does_not_live_and_a_process_that_is_gone_has_no_descendants(sleeper: subprocess.Popen[bytes]) -> None:
    ours = psutil.Process(sleeper.pid)
    assert ours in child_process.descendants(os.getpid())
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert ours.status() == psutil.STATUS_ZOMBIE
    assert child_process.living([ours]) == set()
    assert ours not in child_process.descendants(os.getpid())
    sleeper.wait()
    assert child_process.living([ours]) == child_process.descendants(sleeper.pid) == set()
    child_process.kill_all([ours])


def test_the_children_of_a_stranger_with_the_number_of_a_reaped_child_are_not_killed(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = child_process.ChildProcess(
        "child", command=(sys.executable, "-c", ""), environment=os.environ, log_path=tmp_path / "child.log"
    )
    child.start()
    assert child.wait(60.0)
    monkeypatch.setattr(child_process, "descendants", lambda pid: {psutil.Process(sleeper.pid)})
    child.kill()
    child.stop()
    assert sleeper.poll() is None


def test_a_log_that_has_reached_its_bound_is_put_aside_and_its_writer_goes_on_at_the_beginning(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "one.log"
    child = child_process.ChildProcess(
        "one", command=(sys.executable, "-c", "import time; time.sleep(600)"), environment=os.environ, log_path=log
    )
    child.start()
    try:
        with log.open("ab", buffering=0) as writer:
            for number in range(3):
                writer.write(b"%d" % number * 200)
                bound_log(child.log_path, most_bytes=300)
                bound_log(child.log_path, most_bytes=300)
        assert log.read_bytes() == b"2" * 200
        assert (log.parent / "one.log.1").read_bytes() == b"0" * 200 + b"1" * 200
        with log.open("ab", buffering=0) as writer:
            writer.write(b"3" * 200)
        bound_log(child.log_path, most_bytes=300)
        assert (log.parent / "one.log.1").read_bytes() == b"2" * 200 + b"3" * 200
    finally:
        child.kill()


def test_what_stands_in_the_place_of_a_log_and_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 400)
    log = tmp_path / "one.log"
    child = child_process.ChildProcess("one", command=(sys.executable,), environment={}, log_path=log)
    bound_log(child.log_path, most_bytes=300)
    log.symlink_to(tmp_path / "secret")
    bound_log(child.log_path, most_bytes=300)
    log.unlink()
    os.mkfifo(log)
    bound_log(child.log_path, most_bytes=300)
    assert (tmp_path / "secret").stat().st_size == 400
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.log", "secret"]


def test_a_request_to_end_that_comes_while_a_child_starts_is_answered_when_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a fork Python prints what a signal's handler raises, and goes on."""
    popen = subprocess.Popen

    def interrupted(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return popen(*given, **named)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests by "&"
    child = child_process.ChildProcess("one", command=("sleep", "60"), environment=os.environ, log_path=tmp_path / "l")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.start()
        assert child.pid is not None
    finally:
        child.stop(grace_s=0.0)
    assert not child.is_running
