"""How a worker's process ends: one clear line, and a code that its launcher can act on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from contracts.jobs import WorkerExit
from onbeat.stack.ports import free_port
from tests.forked import STAGE_WORKER


def run(module: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE` to its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    ended = subprocess.run(
        [sys.executable, "-m", module],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended


@pytest.mark.parametrize(
    ("module", "setting", "value", "words"),
    [
        ("producer", "ONBEAT_REDIS_URI", "redis://127.0.0.1", "ONBEAT_REDIS_URI: unknown setting"),
        (STAGE_WORKER, "ONBEAT_JUDGE_URL", "127.0.0.1:8000", "ONBEAT_JUDGE_URL: is no http address"),
        (STAGE_WORKER, "ONBEAT_CRASH_AT", "stage.nowhere", "ONBEAT_CRASH_AT: `stage.nowhere` is not a crash"),
    ],
)
def test_a_bad_setting_is_named(module: str, setting: str, value: str, words: str) -> None:
    ended = run(module, **{setting: value})
    assert ended.returncode == WorkerExit.REFUSED
    assert words in ended.stderr


@pytest.mark.parametrize("module", ["producer", STAGE_WORKER])
def test_an_unreachable_redis_is_one_clear_line(module: str) -> None:
    port = free_port()
    url = f"redis://worker:secret-word@127.0.0.1:{port}/0"
    ended = run(module, ONBEAT_REDIS_URL=url, ONBEAT_BROKER_TIMEOUT_S="0.3")
    assert ended.returncode == WorkerExit.DIED
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "check ONBEAT_REDIS_URL" in ended.stderr
    assert "secret-word" not in ended.stderr
