"""The end of a process has one deadline, whatever the process waits for when it is asked to end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from consumer.supervisor.trainer_process import STOP_GRACE_S as TRAINER_GRACE_S
from onbeat.base.process.ending import CALL_S, END_S, LAUNCHER_END_S, RANKS_END_S, TRAINER_END_S
from onbeat.stack.stack import CONSUMER_GRACE_S
from producer.generator import STOP_GRACE_S as GENERATOR_GRACE_S
from tests.kubernetes import ROOT, documents, pods

DEADLINE_S = 120.0
"""A process that waited for ever would outlast it."""
WITHIN_S = 1.5
PROGRAM = """
import ctypes, logging, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from onbeat.base.process.ending import Ending, end_in_time

logging.basicConfig()
what = sys.argv[1]
ready = lambda: print("ready", flush=True)
for_ever = lambda: time.sleep(3600)
ending = end_in_time(1.5, at_last=for_ever if what == "at last" else lambda: print("at last", flush=True))
if what == "library":
    lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Timer(0.5, ready).start()
    lock(mutex)  # as a look-up of a name does, it never lets a handler run
elif what == "handler":
    signal.signal(signal.SIGTERM, lambda *_: for_ever())
    ready()
    for_ever()
elif what == "clean-up":
    try:
        ready()
        for_ever()
    finally:
        for_ever()
elif what in ("thread", "at last"):
    ThreadPoolExecutor().submit(for_ever)
    ready()
    for_ever()
elif what == "event loop":
    import asyncio
    async def run():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.begin)
        ready()
        await asyncio.sleep(3600)
    asyncio.run(run())
elif what == "nothing":
    ready()
    for_ever()
"""


def ended(what: str, *, number: int = signal.SIGTERM) -> tuple[int, str, float]:
    """Exit code, what it said after `ready`, and the seconds from the signal to its end."""
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        asked_s = time.monotonic()
        os.kill(child.pid, number)
        said, _ = child.communicate(timeout=DEADLINE_S)
        return child.returncode, said, time.monotonic() - asked_s
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("what", ["library", "handler", "clean-up", "thread", "event loop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_in_time_whatever_it_waits_for_and_does_its_last_act(what: str, number: int) -> None:
    if (what, number) in (("handler", signal.SIGINT), ("event loop", signal.SIGINT)):
        pytest.skip("it has a handler for SIGTERM alone")
    code, said, took_s = ended(what, number=number)
    assert code == 0
    assert "at last" in said
    assert "this process ends now" in said
    assert took_s < DEADLINE_S


def test_a_last_act_that_hangs_does_not_keep_the_process() -> None:
    code, _, _ = ended("at last")
    assert code == 0


def test_a_process_that_waits_for_nothing_ends_at_once_and_does_not_say_that_it_waited() -> None:
    code, said, _ = ended("nothing")
    assert (code, said) == (0, "")


def test_a_process_sees_the_end_of_what_it_has_started_before_its_own_deadline() -> None:
    assert TRAINER_END_S < RANKS_END_S < LAUNCHER_END_S <= TRAINER_GRACE_S < END_S
    assert GENERATOR_GRACE_S < END_S
    assert 2 * CALL_S < TRAINER_END_S, "a call that waits, and one that comes after it, leave time for a file"
    assert END_S < CONSUMER_GRACE_S


def test_whoever_stops_a_service_gives_it_more_time_than_it_takes() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    graces_s = [int(seconds) for seconds in re.findall(r"stop_grace_period: (\d+)s", compose)]
    assert graces_s
    assert min(graces_s) > END_S + 1.0
    for app, pod in pods(documents(ROOT / "deploy" / "kubernetes" / "scaling")).items():
        # What Kubernetes gives where nothing is said: 30 s.
        assert pod["spec"].get("terminationGracePeriodSeconds", 30) > END_S + 1.0, app
