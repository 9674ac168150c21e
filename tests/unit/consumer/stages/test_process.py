"""How a stage worker's process ends: one clear line, and a code that its launcher can act on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from contracts.jobs import WorkerExit
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
    assert ended.returncode == WorkerExit.REFUSED
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unreachable_redis_is_one_clear_line() -> None:
    url = f"redis://stage:secret-word@127.0.0.1:{free_port()}/0"
    ended = run_worker(ONBEAT_REDIS_URL=url, ONBEAT_BROKER_TIMEOUT_S="0.3")
    assert ended.returncode == WorkerExit.DIED
    assert "Redis" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "secret-word" not in ended.stderr
