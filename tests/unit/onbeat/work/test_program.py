"""How a worker's process ends: a launcher can tell a death at work from one at the start, and no thread keeps it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from contracts.jobs import WorkerExit, is_of_work

ENDS = """
import asyncio, logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contracts.errors import EngineUnavailable
from contracts.jobs import WorkerExit
from onbeat.work.program import until_signal

logging.basicConfig()
when, thread = sys.argv[1:]

class Worker:
    name = "worker w"
    has_claimed = when == "at work"

    def stop(self):
        pass

    async def run(self):
        if thread == "hangs":
            ThreadPoolExecutor().submit(threading.Event().wait)
        if when != "never":
            raise BaseExceptionGroup("", [MemoryError("of a batch")])

ends = until_signal(Worker(), what="all jobs", hangs=lambda died_of: thread == "hangs")
try:
    sys.exit(asyncio.run(ends))
except* MemoryError:
    sys.exit(WorkerExit.DIED)
"""


@pytest.mark.parametrize(
    ("when", "thread", "code"),
    [
        ("at its start", "", WorkerExit.DIED),
        ("at its start", "hangs", WorkerExit.DIED_AT_WORK),
        ("at work", "", WorkerExit.DIED_AT_WORK),
        ("at work", "hangs", WorkerExit.DIED_AT_WORK),
        ("never", "", WorkerExit.STOPPED),
        ("never", "hangs", WorkerExit.STOPPED),
    ],
)
def test_the_code_says_whether_it_died_at_work_and_a_thread_that_hangs_does_not_keep_it(
    when: str, thread: str, code: WorkerExit
) -> None:
    command = [sys.executable, "-c", ENDS, when, thread]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, ended.stderr
    assert is_of_work(ended.returncode) is (code == WorkerExit.DIED_AT_WORK)
    assert ("of a batch" in ended.stderr) is (code == WorkerExit.DIED_AT_WORK)
