"""A client of the stack ends with its deadline, takes no more than its bound, and shows no key."""

from __future__ import annotations

import asyncio
import gzip
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from onbeat.base.http.outgoing import (
    FOLLOWED,
    HIDDEN,
    AnswerRefused,
    answer_text,
    downloaded,
    legible,
    make_async_client,
    make_client,
)

KEY = "a-key:with+marks=="
HEAD = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def server(answer: Callable[[Any, threading.Event], None]) -> Iterator[str]:
    """Its address. answer: writes to a connection, until it returns or the client goes; the event says that it ends."""
    ended = threading.Event()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            try:
                answer(self.request, ended)
            except OSError:
                """The client went."""

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            ended.set()
            listening.shutdown()
            thread.join()


def get(kind: str, url: str, **options: Any) -> httpx.Response:
    if kind == "sync":
        with make_client(url, **options) as http:
            return http.get("/")

    async def ask() -> httpx.Response:
        async with make_async_client(url, **options) as http:
            return await http.get("/")

    return asyncio.run(ask())


BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


@BOTH
@pytest.mark.parametrize("part", [HEAD, HEAD + b"content-length: 1000\r\n\r\n"], ids=["head", "body"])
def test_an_answer_that_trickles_ends_with_the_deadline_of_its_request(kind: str, part: bytes) -> None:
    def trickle(connection: Any, ended: threading.Event) -> None:
        connection.sendall(part)
        # A byte now and then: no read of the client ever waits for long.
        while not ended.wait(0.02):
            connection.sendall(b"x")

    with server(trickle) as url, pytest.raises(httpx.ReadTimeout, match="no whole answer"):
        get(kind, url, timeout=0.2)


@BOTH
def test_an_answer_has_at_most_so_many_bytes_said_or_not(kind: str) -> None:
    def endless(connection: Any, ended: threading.Event) -> None:
        connection.sendall(HEAD + b"\r\n")
        while not ended.is_set():
            connection.sendall(65536 * b" ")

    with server(endless) as url, pytest.raises(AnswerRefused, match="longer than 100000 bytes"):
        get(kind, url, max_answer_bytes=100_000)


@BOTH
def test_a_compressed_answer_is_not_unpacked(kind: str) -> None:
    def compressed(connection: Any, _ended: threading.Event) -> None:
        connection.sendall(HEAD + b"content-encoding: gzip\r\nconnection: close\r\n\r\n" + gzip.compress(1000 * b"7"))

    with server(compressed) as url, pytest.raises(AnswerRefused, match="compressed"):
        get(kind, url)


@BOTH
def test_a_redirect_is_an_answer_and_nothing_is_sent_to_where_it_leads(kind: str) -> None:
    def moved(connection: Any, _ended: threading.Event) -> None:
        place = b"location: http://127.0.0.1:1/\r\n"
        connection.sendall(b"HTTP/1.1 307 Moved\r\ncontent-length: 0\r\n" + place + b"\r\n")

    with server(moved) as url:
        assert get(kind, url).status_code == 307


def test_events_have_no_end_together_and_each_one_has_a_bound() -> None:
    def events(connection: Any, ended: threading.Event) -> None:
        connection.sendall(HEAD + b"\r\n")
        # However the network cuts them: together, and within the end of an event.
        together = 10 * (b"data: " + 900 * b"x" + b"\n\n")
        for cut in (together[:4539], together[4539:]):
            connection.sendall(cut)
            ended.wait(0.05)
        while not ended.is_set():
            connection.sendall(1000 * b"x")

    with (
        server(events) as url,
        make_client(url, max_answer_bytes=2000) as http,
        http.stream("GET", "/", extensions=FOLLOWED) as answer,
    ):
        lines = answer.iter_lines()
        assert [len(next(lines)) for _ in range(20)] == 10 * [906, 0]
        with pytest.raises(AnswerRefused, match="longer than 2000"):
            next(lines)


def answered(body: bytes) -> httpx.Response:
    request = httpx.Request("POST", "http://there", headers={"authorization": f"Bearer {KEY}"})
    return httpx.Response(500, content=body, request=request)


ESCAPED = "".join(f"\\u{ord(letter):04x}" for letter in KEY)


@pytest.mark.parametrize(
    "body",
    [
        f"the key is {KEY}.",
        json.dumps({"error": {"message": [f"the key is {KEY}."]}}),
        json.dumps({f"the key is {KEY}.": 1}),
        f'{{"message": "the key is {ESCAPED}."}}',
        f'{{"message": "the key is \\u0061{KEY[1:]}."}}',
        f'{{"message": "the key is {KEY[:-1]}\\/".'.replace("\\/", KEY[-1]),
    ],
    ids=["text", "JSON", "name", "escapes", "one escape", "broken JSON"],
)
def test_no_spelling_of_the_key_is_shown(body: str) -> None:
    shown = answer_text(answered(body.encode()))
    assert f"the key is {HIDDEN}" in shown
    assert KEY not in shown
    assert "\\u" not in shown


def test_what_holds_no_key_is_shown_as_it_is_and_as_much_as_a_reason_has_room_for() -> None:
    assert answer_text(answered(1000 * b"x")) == 300 * "x"
    assert json.loads(legible(answered(b'{"a": [1, 2.5, null, true, "\\u00e9"]}'))) == {"a": [1, 2.5, None, True, "é"]}
    deep = 100_000 * b"["
    assert legible(answered(deep)) == deep


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(1000, True), (1001, False)])
def test_a_download_may_be_as_long_as_it_was_told_and_no_longer(num_bytes: int, is_taken: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=bytes(num_bytes))

    with make_client("http://x", max_answer_bytes=100, transport=httpx.MockTransport(answer)) as http:
        if is_taken:
            assert len(http.get("/", extensions=downloaded(1000)).content) == num_bytes
        else:
            with pytest.raises(AnswerRefused, match="longer than 1000 bytes"):
                http.get("/", extensions=downloaded(1000))
        with pytest.raises(AnswerRefused, match="longer than 100 bytes"):
            http.get("/")
