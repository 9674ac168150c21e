"""How the generator process ends: one clear line, and a code that its launcher can act on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest


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
