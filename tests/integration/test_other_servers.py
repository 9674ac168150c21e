"""Servers that can't hold a stack's jobs are refused by each process that starts, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from broker.connection.client import connect
from broker.connection.probe import probe
from broker.presence import Presence
from contracts.errors import BrokerUnavailable, InvalidInput
from contracts.settings import StackSettings
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from onbeat.stack.redis import find_server_binary
from tests.until import until


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts a server with these flags, and answers its address."""
    children: list[ChildProcess] = []

    def started(*flags: str) -> str:
        port = free_port()
        command = (str(find_server_binary()), "--port", str(port), "--dir", str(tmp_path), "--save", "", *flags)
        if "--cluster-enabled" in flags:
            # A server's own choice, its port + 10,000, may be that of a connection: then it ends at once.
            command += ("--cluster-port", str(free_port()))
        children.append(ChildProcess("server", command=command, environment={}, log_path=tmp_path / "server.log"))
        children[-1].start()
        return f"redis://127.0.0.1:{port}/0"

    yield started
    for child in children:
        child.kill()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--cluster-enabled", "yes"), "ONBEAT_REDIS_URL: is a Redis Cluster"),
        (
            ("--rename-command", "FUNCTION", "", "--rename-command", "FCALL", ""),
            "ONBEAT_REDIS_URL: leads to a server without functions",
        ),
    ],
)
def test_a_cluster_and_a_server_without_functions_are_refused_at_the_start(
    start: Callable[..., str], flags: tuple[str, ...], problem: str
) -> None:
    url = start(*flags)
    settings = StackSettings(redis_url=url)
    broker = until(lambda: connect(settings), "the server to answer", away=(BrokerUnavailable,))
    with pytest.raises(InvalidInput, match=problem):
        probe(url)
    with pytest.raises(InvalidInput, match=problem):
        broker.check()
    # What a worker asks, whose role may not look at the server.
    with pytest.raises(InvalidInput, match=problem):
        Presence(broker).live()
    broker.close()


def test_sentinels_that_know_no_primary_are_named_in_one_line() -> None:
    places = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnavailable) as caught:
        probe(f"redis+sentinel://:secret-word@{places}/onbeat/0?sentinel_password=secret-word")
    one, other = places.split(",")
    assert "no sentinel reports where the primary `onbeat` is" in str(caught.value)
    assert f"{one} does not answer" in str(caught.value)
    assert f"{other} does not answer" in str(caught.value)
    assert "secret-word" not in str(caught.value)
