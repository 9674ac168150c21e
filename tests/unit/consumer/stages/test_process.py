"""How a stage worker's process ends: one clear line, and a code that its launcher can act on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from contracts.jobs import StageWorkerExit, is_of_work
from onbeat.stack.ports import free_port


def run_worker(**environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m consumer.stages` to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    return subprocess.run(
        [sys.executable, "-m", "consumer.stages"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("ONBEAT_JUDGE_URI", "http://127.0.0.1", "ONBEAT_JUDGE_URI: unknown setting"),
        ("ONBEAT_JUDGE_URL", "127.0.0.1:8000", "ONBEAT_JUDGE_URL: is no http address"),
        ("ONBEAT_CRASH_AT", "stage.nowhere", "ONBEAT_CRASH_AT: `stage.nowhere` is not a crash point"),
    ],
)
def test_a_bad_setting_is_named(setting: str, value: str, words: str) -> None:
    ended = run_worker(**{setting: value})
    assert ended.returncode == StageWorkerExit.REFUSED
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unreachable_redis_is_one_clear_line() -> None:
    url = f"redis://stage:secret-word@127.0.0.1:{free_port()}/0"
    ended = run_worker(ONBEAT_REDIS_URL=url, ONBEAT_BROKER_TIMEOUT_S="0.3")
    assert ended.returncode == StageWorkerExit.DIED
    assert "Redis" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret-word" not in ended.stderr


ENDS = """
import asyncio, sys, threading
from unittest import mock
import consumer.stages.__main__ as process
from contracts.errors import DeadlineExceeded
from contracts.settings import StackSettings

class Worker:
    has_claimed = sys.argv[1] == "at work"

    def __init__(self, **_):
        pass

    def stop(self):
        pass

    async def run(self):
        raise BaseExceptionGroup("", [DeadlineExceeded("stage teacher is not done")])

class Service:
    server, is_busy = None, Worker.has_claimed

    def preload(self):
        if self.is_busy:
            threading.Thread(target=threading.Event().wait).start()

process.StageWorker = Worker
services = {"teacher": Service()}
try:
    sys.exit(asyncio.run(process.serve(StackSettings(), mock.Mock(), services, worker_id="w")))
except* DeadlineExceeded:
    sys.exit(process.StageWorkerExit.DIED)
"""


@pytest.mark.parametrize("when", ["at its start", "at work"])
def test_a_thread_that_hangs_does_not_keep_the_process_and_a_launcher_can_tell_a_death_at_work(when: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, when], capture_output=True, text=True, timeout=300, check=False)
    assert is_of_work(ended.returncode) is (when == "at work")
    assert ended.returncode == (StageWorkerExit.DIED_AT_WORK if when == "at work" else StageWorkerExit.DIED)
