"""A client that pauses, dawdles, floods or never reads is let go; a real server on loopback, with short limits."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from starlette.types import Receive, Scope, Send

from onbeat.base.http.server import ServerLimits
from tests import served

SHORT = ServerLimits(head_s=0.5, body_s=0.5, bytes_per_s=1e6, discard_s=0.5, write_s=0.5, max_connections=4)
LONG_S = 60.0
"""How long a test waits for the server before it fails."""
HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


class Peer:
    """A client made of bytes."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(LONG_S)
        self.socket.connect(("127.0.0.1", port))

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def rest(self) -> bytes:
        """All that comes until the server ends the connection."""
        found = bytearray()
        with suppress(ConnectionResetError):
            while chunk := self.socket.recv(65536):
                found += chunk
        return bytes(found)

    def head(self) -> bytes:
        found = b""
        while b"\r\n\r\n" not in found:
            found += self.socket.recv(1)
        return found

    def trickle(self, data: bytes) -> int:
        """Sends it again and again, a piece every 10 ms, until the server ends the connection; how many went out."""
        sent = 0
        end_s = time.monotonic() + LONG_S
        with suppress(ConnectionResetError, BrokenPipeError):
            while time.monotonic() < end_s:
                self.socket.sendall(data)
                sent += 1
                time.sleep(0.01)
            pytest.fail("the server listened for ever")
        return sent


class App:
    """Reads the body and answers, with as many bytes as the path says; `/refuse` answers before the body."""

    def __init__(self) -> None:
        self.bodies: list[int] = []
        self.is_held = threading.Event()
        self.release = threading.Event()
        self.ended: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if scope["path"] == "/endless":
            await send(start)
            while not await _has_left(receive):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            self.ended.append("endless")
            return
        if scope["path"] == "/hold":
            self.is_held.set()
            await asyncio.to_thread(self.release.wait, LONG_S)
        elif scope["path"] != "/refuse":
            size, more = 0, True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.ended.append("body")
                    return
                size, more = size + len(message["body"]), message["more_body"]
            self.bodies.append(size)
        size = int(scope["path"].strip("/")) if scope["path"].strip("/").isdecimal() else 2
        await send(start | {"headers": [(b"content-length", str(size).encode())]})
        await send({"type": "http.response.body", "body": b"k" * size})


async def _has_left(receive: Receive) -> bool:
    """Whether the client has, without waiting for it."""
    try:
        while (await asyncio.wait_for(receive(), 0.001))["type"] != "http.disconnect":
            pass
    except TimeoutError:
        return False
    return True


@contextmanager
def serving(app: App, limits: ServerLimits = SHORT) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []
    with served.serving(app, grace_s=1.0, limits=limits) as url:
        port = int(url.rpartition(":")[2])

        def connect(**options: int) -> Peer:
            peers.append(Peer(port, **options))
            return peers[-1]

        try:
            yield connect
        finally:
            app.release.set()
            for peer in peers:
                peer.socket.close()


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "],
    ids=["nothing", "half a request line", "half a header"],
)
def test_a_head_that_does_not_end_is_not_waited_for(sent: bytes) -> None:
    with serving(App()) as connect:
        peer = connect()
        peer.send(sent)
        assert peer.rest() == b""


@pytest.mark.parametrize("start", [b"", HEAD + b"X: "], ids=["of its first line", "of a header"])
def test_a_head_that_trickles_in_is_not_waited_for_either(start: bytes) -> None:
    with serving(App()) as connect:
        peer = connect()
        peer.send(start)
        assert peer.trickle(b"G") > 1


def test_a_second_head_on_the_same_connection_has_the_same_limit() -> None:
    app = App()
    with serving(app) as connect:
        peer = connect()
        peer.send(HEAD + b"Content-Length: 2\r\n\r\nhi")
        assert peer.head().startswith(b"HTTP/1.1 200")
        assert peer.socket.recv(2) == b"kk"
        assert peer.trickle(b"G") > 1
    assert app.bodies == [2]


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000\r\n", b"Transfer-Encoding: chunked\r\n"])
def test_a_body_that_stalls_ends_with_its_connection(framing: bytes) -> None:
    app = App()
    with serving(app) as connect:
        peer = connect()
        peer.send(HEAD + framing + b"\r\n" + (b"2\r\nhi\r\n" if b"chunked" in framing else b"hi"))
        assert peer.rest() == b""
    assert (app.bodies, app.ended) == ([], ["body"])


def test_a_body_that_trickles_in_ends_and_one_that_flows_does_not() -> None:
    app = App()
    with serving(app) as connect:
        slow = connect()
        slow.send(HEAD + b"Content-Length: 1000000\r\n\r\n")
        assert slow.trickle(b"x") > 1
        flowing = connect()
        flowing.send(HEAD + b"Content-Length: 3000000\r\nConnection: close\r\n\r\n")
        for _ in range(3):
            flowing.send(b"x" * 1_000_000)
        assert flowing.rest().endswith(b"kk")
    assert app.bodies == [3_000_000]


def test_a_body_that_nobody_reads_is_dropped_for_a_while_and_its_answer_arrives() -> None:
    app = App()
    with serving(app) as connect:
        peer = connect()
        peer.send(b"POST /refuse HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert peer.head().startswith(b"HTTP/1.1 200")
        assert peer.trickle(b"100\r\n" + b"x" * 256 + b"\r\n") > 1


@pytest.mark.parametrize("path", ["/endless", "/30000000"])
def test_a_client_that_does_not_read_its_answer_is_let_go(path: str) -> None:
    app = App()
    with serving(app) as connect:
        peer = connect(receive_buffer=4096)
        peer.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode())
        other = connect()
        while True:  # the first one still holds its place: others are served, and see it go
            other.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert other.head().startswith(b"HTTP/1.1 200")
            other.socket.recv(2)
            if _is_gone(peer):
                break
        assert len(peer.rest()) < 30_000_000


def _is_gone(peer: Peer) -> bool:
    """Whether the server has reset the connection, without reading from it."""
    try:
        peer.socket.send(b"\r\n")
    except (ConnectionResetError, BrokenPipeError):
        return True
    return False


def test_an_answer_that_is_read_steadily_arrives_whole_however_long_it_takes() -> None:
    with serving(App(), ServerLimits(write_s=0.5, bytes_per_s=1000.0)) as connect:
        peer = connect(receive_buffer=4096)
        peer.send(b"GET /90000000 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert len(peer.rest()) > 90_000_000


def test_idle_connections_make_room_and_requests_in_flight_do_not() -> None:
    app = App()
    with serving(app, ServerLimits(max_connections=4)) as connect:
        idle = [connect() for _ in range(4)]
        idle[0].send(b"GET / HT")  # it is the oldest all the same
        held = connect()
        held.send(b"GET /hold HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert idle[0].rest() == b""
        assert app.is_held.wait(LONG_S)
        others = [connect() for _ in range(3)]
        for peer in others:
            peer.send(b"GET /hold HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert [peer.rest() for peer in idle[1:]] == [b"", b"", b""]
        refused = connect().rest()
        head, _, body = refused.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["status"] == 503
        app.release.set()
        assert [peer.rest()[-2:] for peer in (held, *others)] == [b"kk"] * 4


def test_a_body_that_breaks_after_the_answer_began_ends_both_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App()
    with caplog.at_level(logging.ERROR), serving(app) as connect:
        peer = connect()
        peer.send(b"POST /endless HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
        assert peer.head().startswith(b"HTTP/1.1 200")
        while peer.socket.recv(1) != b"x":
            pass
        peer.send(b"zz\r\n")
        assert set(peer.rest()) >= set(b"x")
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        b"POST /refuse HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade, close\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
def test_bytes_that_are_no_request_end_the_connection_without_a_traceback(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), serving(App()) as connect:
        peer = connect()
        with suppress(ConnectionResetError, BrokenPipeError):
            peer.send(sent)
        answer = peer.rest()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
        after = connect()
        after.send(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert after.rest().endswith(b"kk")
    assert [record.getMessage() for record in caplog.records] == []
