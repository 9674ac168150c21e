"""A Redis that hangs, stopped in the middle of whatever it did, is no worse than one that is dead (I8)."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.connection.client import connect
from broker.job_store import JobStore
from broker.presence import Presence
from contracts.errors import BrokerUnavailable
from contracts.settings import StackSettings
from onbeat.stack.options import child_environment
from onbeat.stack.redis import EmbeddedRedis
from tests.forked import ForkedChild

FOR_EVER_S = 3600.0
"""A process that waited for its broker so long would outlast the test's deadline."""
DEADLINE_S = 300.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server
        if server.child.is_running:
            go_on(server)


def stop(server: EmbeddedRedis) -> None:
    assert server.child.pid is not None
    os.kill(server.child.pid, signal.SIGSTOP)


def go_on(server: EmbeddedRedis) -> None:
    assert server.child.pid is not None
    os.kill(server.child.pid, signal.SIGCONT)


def test_calls_end_and_serve_again_when_the_server_goes_on(server: EmbeddedRedis) -> None:
    settings = StackSettings(redis_url=server.url)
    broker = connect(settings, patience_s=0.5)
    stop(server)
    for call in (broker.ping, broker.now_s, broker.durability.persisted, Presence(broker).live):
        with pytest.raises(BrokerUnavailable):
            call()
    with pytest.raises(BrokerUnavailable):
        JobStore(broker).wait_for_changes("0", 0.1)
    go_on(server)
    broker.ping()
    assert broker.durability.persisted()


@pytest.mark.parametrize("how", ["hangs", "is dead"])
def test_a_generator_that_is_asked_to_end_does_not_wait_for_its_broker(
    server: EmbeddedRedis, tmp_path: Path, how: str
) -> None:
    settings = StackSettings(redis_url=server.url, run_root=str(tmp_path), broker_timeout_s=FOR_EVER_S)
    broker = connect(settings)
    child = ForkedChild(
        "producer",
        command=(sys.executable, "-m", "producer"),
        environment=child_environment(os.environ, settings, port=0),
        log_path=tmp_path / "producer.log",
    )
    child.start()
    try:
        while not Presence(broker).live():
            assert child.is_running, child.tail()
            time.sleep(0.05)
        if how == "hangs":
            stop(server)
        else:
            server.kill()
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(DEADLINE_S), child.tail()
        assert child.exit_code == 0, child.tail()
    finally:
        child.kill()
