"""A killed parent tells its child by a signal for each of its threads: one may interrupt the answer to another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.pipeline import REPOSITORY

FLOOD_S, DEADLINE_S = 2.0, 120.0
BEGIN = """
import signal, sys, threading, time
from types import SimpleNamespace
from consumer.supervisor.__main__ import LookOut
from contracts.jobs import JobState
from onbeat.loop.lease_keeper import LeaseKeeper, Stopped

has_ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), has_ended.set())).start()
"""
TRAINER = """
keeper = LeaseKeeper(None, lease_s=1.0)
signal.signal(signal.SIGTERM, lambda *_: keeper.request_stop())
print("ready", flush=True)
while not has_ended.is_set():
    sum(range(100))
try:
    keeper.check()
except Stopped:
    print("stopped")
"""
CONSUMER = """
def change(newest, timeout_s):
    time.sleep(0.01)
    if has_ended.is_set():
        look_outs[-1].stop()
    return newest

reconciler = SimpleNamespace(reconcile=lambda: None, close=lambda: None)
jobs = SimpleNamespace(wait_for_changes=change)
look_outs = [LookOut(reconciler, jobs)]
signal.signal(signal.SIGTERM, lambda *_: look_outs[-1].stop())
print("ready", flush=True)
while not has_ended.is_set():
    look_outs[-1].run()
    look_outs.append(LookOut(reconciler, jobs))
print("stopped")
"""


@pytest.mark.parametrize("program", [TRAINER, CONSUMER], ids=["trainer", "consumer"])
def test_a_signal_that_interrupts_the_answer_to_another_is_answered(program: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", BEGIN + program],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        ends_s = time.monotonic() + FLOOD_S
        while time.monotonic() < ends_s:
            os.kill(child.pid, signal.SIGTERM)
        answer, _ = child.communicate(timeout=DEADLINE_S)
        assert (answer, child.returncode) == ("stopped\n", 0)
    finally:
        child.kill()
        child.wait()
