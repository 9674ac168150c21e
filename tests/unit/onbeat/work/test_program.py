"""How a worker's process ends: a launcher can tell a death at work from one at the start, and no thread keeps it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import NoReturn

import pytest

from contracts.errors import BrokerUnavailable
from contracts.jobs import WorkerExit, is_of_work
from contracts.settings import StackSettings, settings_from
from contracts.spec.limits import TimeoutSpec
from onbeat.work import program
from tests.refusals import refusal_of

ENDS = """
import asyncio, logging, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contracts.jobs import WorkerExit
from onbeat.base.process.ending import Ending
from onbeat.work.program import until_signal

logging.basicConfig()
when, thread = sys.argv[1:]

class Worker:
    name = "worker w"
    has_claimed = when == "at work"

    def stop(self):
        pass

    async def run(self):
        if thread:
            ThreadPoolExecutor().submit(threading.Event().wait)
        if when != "never":
            raise BaseExceptionGroup("", [MemoryError("of a batch")])

ends = until_signal(
    Worker(),
    what="all jobs",
    ending=Ending(),
    hangs=lambda: thread == "hangs",
    dies_of_work=lambda group: thread == "of the engine",
)
try:
    code = asyncio.run(ends)
except* MemoryError:
    code = WorkerExit.DIED
sys.exit(code)
"""


def test_a_call_of_a_generator_ends_in_time_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """`BrokerCalls` repeats it on another connection: one that is dead costs no lease."""
    patience: list[float] = []

    def connect_within(settings: StackSettings, *, patience_s: float) -> NoReturn:
        patience.append(patience_s)
        raise BrokerUnavailable("nothing answers")

    monkeypatch.setattr(program, "connect_within", connect_within)
    assert program.run_worker("producer", lambda settings: nothing) == WorkerExit.DIED
    assert patience[0] < TimeoutSpec().generator_lease_s


async def nothing(*_: object) -> int:
    return WorkerExit.STOPPED


@pytest.mark.parametrize(
    ("when", "thread", "code"),
    [
        ("at its start", "", WorkerExit.DIED),
        ("at its start", "hangs", WorkerExit.DIED),
        ("at its start", "of the engine", WorkerExit.DIED_AT_WORK),
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
    assert ("of a batch" in ended.stderr) is (when == "at work" or bool(thread and when != "never"))


def test_a_process_is_called_by_its_name_and_each_of_its_lives_has_an_id_of_its_own() -> None:
    named = StackSettings(name="generator-1")
    assert re.fullmatch(r"generator-1-[0-9a-f]{8}", named.process_id("own"))
    assert named.process_id() != named.process_id()
    host = re.escape(socket.gethostname())
    assert re.fullmatch(rf"own-{host}-{os.getpid()}-[0-9a-f]{{8}}", StackSettings().process_id("own"))
    assert re.fullmatch(rf"{host}-{os.getpid()}-[0-9a-f]{{8}}", StackSettings().process_id())


@pytest.mark.parametrize("name", ["a b", "x\n", "a/b", "n" * 65])
def test_a_name_that_could_not_stand_in_an_id_is_refused(name: str) -> None:
    with refusal_of("ONBEAT_NAME"):
        settings_from({"ONBEAT_NAME": name})
