"""How the generator process ends: one clear line, and a code that its launcher can act on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from contracts.jobs import GeneratorExit


def run_producer(**environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m producer` to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    return subprocess.run(
        [sys.executable, "-m", "producer"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_unknown_setting_is_named() -> None:
    ended = run_producer(ONBEAT_REDIS_URI="redis://127.0.0.1")
    assert ended.returncode == 2
    assert "ONBEAT_REDIS_URI: unknown setting" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unreachable_redis_is_one_clear_line(unused_port: int) -> None:
    ended = run_producer(
        ONBEAT_REDIS_URL=f"redis://:secret-word@127.0.0.1:{unused_port}/0", ONBEAT_BROKER_TIMEOUT_S="0.3"
    )
    assert ended.returncode == 1
    assert str(unused_port) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret-word" not in ended.stderr


DIES = """
import asyncio, sys
from producer.__main__ import run_to_its_end

class Generator:
    has_claimed = sys.argv[1] == "at work"

    async def run(self):
        raise BaseExceptionGroup("", [MemoryError("of a batch")])

sys.exit(asyncio.run(run_to_its_end(Generator())))
"""


@pytest.mark.parametrize(("when", "code"), [("at its start", 1), ("at work", GeneratorExit.DIED_AT_WORK)])
def test_a_launcher_can_tell_a_death_at_work_from_one_at_the_start(when: str, code: int) -> None:
    ended = subprocess.run([sys.executable, "-c", DIES, when], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code
    assert "MemoryError: of a batch" in ended.stderr


HANGS = """
import asyncio, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from contracts.errors import EngineUnavailable
from producer.__main__ import run_to_its_end

class Generator:
    async def run(self):
        ThreadPoolExecutor().submit(threading.Event().wait)
        raise BaseExceptionGroup("", [EngineUnavailable("batch 0/train/0 is not done after 1800 s")])

asyncio.run(run_to_its_end(Generator()))
"""


def test_a_thread_that_hangs_in_the_engine_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=300.0, check=False)
    assert ended.returncode == GeneratorExit.DIED_AT_WORK
    assert "batch 0/train/0 is not done" in ended.stderr
