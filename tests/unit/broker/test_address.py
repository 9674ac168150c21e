"""One reading of a Redis address."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.connection import SSLConnection
from redis.exceptions import ConnectionError

from broker.connection.address import read_address
from broker.connection.client import connect
from contracts.errors import BrokerUnavailable, InvalidInput
from contracts.settings import StackSettings

TLS_HANDSHAKE = b"\x16"
COMMAND = b"*"


class FirstByte:
    """Takes connections, keeps the first byte of each, and hangs up."""

    def __init__(self, listener: socket.socket) -> None:
        self.bytes: list[bytes] = []
        self.listener = listener
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with connection:
                self.bytes.append(connection.recv(1))


@pytest.fixture(params=["redis", "rediss", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, FirstByte]]:
    if request.param == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        url = f"unix://trainer:secret-word@{tmp_path}/s?db=3"
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"{request.param}://trainer:secret-word@127.0.0.1:{listener.getsockname()[1]}/3"
    yield url, FirstByte(listener)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_call_goes_to_the_address_by_its_own_way_and_a_password_never_in_the_clear(
    address: tuple[str, FirstByte], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url, server = address
    with pytest.raises(BrokerUnavailable) as caught:
        connect(StackSettings(redis_url=url), patience_s=0.5)
    assert set(server.bytes) == {TLS_HANDSHAKE if url.startswith("rediss") else COMMAND}
    assert "secret-word" not in str(caught.value) + caplog.text


def test_a_path_is_read_as_a_url_writes_it() -> None:
    path = "/a b/ö@;#?%/redis.sock"
    address = read_address("unix://stage:p%40ss@/a%20b/%C3%B6%40%3B%23%3F%25/redis.sock?db=2")
    assert [address[name] for name in ("path", "username", "password", "db")] == [path, "stage", "p@ss", 2]


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://trainer:secret-word@one:26379,two:26379",
        "redis+sentinel://trainer:secret-word@one:26379,/onbeat/0",
        "redis+sentinel://trainer:secret-word@one:26379,two:no-port/onbeat/0",
        "redis+sentinel://trainer:secret-word@one/onbeat/no-number",
        "unix+sentinel://trainer:secret-word@one/onbeat/0",
        "redis+sentinel://trainer:secret-word@one/onbeat/0?no_such_option=secret-word",
    ],
)
def test_a_bad_address_of_sentinels_is_refused_with_the_form_and_without_its_password(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"ONBEAT_REDIS_URL.*HOST:PORT,HOST:PORT/NAME/0") as refusal:
        read_address(url)
    assert "secret-word" not in str(refusal.value)


@pytest.mark.parametrize(("scheme", "tls"), [("redis", False), ("rediss", True)])
def test_an_address_of_sentinels_has_their_hosts_and_password_and_the_servers_own(
    scheme: str, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = read_address(
        f"{scheme}+sentinel://trainer:pass%2Fword@one:1234,[::1],three:5/the%20name/2"
        "?sentinel_password=their%2Fs&sentinel_username=they&protocol=3"
    )
    assert (address["username"], address["password"], address["db"]) == ("trainer", "pass/word", 2)
    assert address["protocol"] == 3
    connection = address["connection_class"](username="trainer")
    assert isinstance(connection, SSLConnection) == tls
    asked: list[tuple[Any, str]] = []

    def unreachable(sentinel: Any, name: str) -> None:
        asked.append((sentinel.connection_pool.connection_kwargs, name))
        raise ConnectionError

    monkeypatch.setattr("redis.Redis.sentinel_master", unreachable)
    with pytest.raises(ConnectionError, match="1234 does not answer"):
        connection.connect()
    assert {(one["host"], one["port"]) for one, _ in asked} == {("one", 1234), ("::1", 26379), ("three", 5)}
    assert {(one["username"], one["password"]) for one, _ in asked} == {("they", "their/s")}
    assert {name for _, name in asked} == {"the name"}
