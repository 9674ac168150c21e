"""A broker's own connections: what they send is what redis-py would, and each is clean for the next command."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError, ResponseError

from broker.connection.client import connect
from broker.connection.own_connections import LARGE_BYTES, OwnConnections, packed
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis


@pytest.fixture
def connections(redis_server: EmbeddedRedis) -> Iterator[OwnConnections]:
    broker = connect(StackSettings(redis_url=redis_server.url))
    yield OwnConnections(broker.redis.connection_pool)
    broker.close()  # a client that is forgotten closes the pool's connections whenever it is collected


def test_a_command_in_pieces_is_the_command_and_copies_nothing_large() -> None:
    large = os.urandom(LARGE_BYTES)
    small: list[str | int | bytes] = ["EVALSHA", "ab", 1, "kéy", b"\r\n", b""]
    whole = b"*8\r\n$7\r\nEVALSHA\r\n$2\r\nab\r\n$1\r\n1\r\n$4\r\nk\xc3\xa9y\r\n$2\r\n\r\n\r\n$0\r\n\r\n"
    pieces = packed([*small, large, 7])
    assert b"".join(pieces) == whole + b"$%d\r\n%b\r\n$1\r\n7\r\n" % (len(large), large)
    assert any(piece is large for piece in pieces)
    assert packed([*small, b"x", 7]) == [whole + b"$1\r\nx\r\n$1\r\n7\r\n"]


def test_a_connection_that_the_server_ended_is_made_anew(
    connections: OwnConnections, redis_server: EmbeddedRedis
) -> None:
    ended = connections.ask("CLIENT", "ID")
    connect(StackSettings(redis_url=redis_server.url)).redis.client_kill_filter(_id=ended)
    assert connections.ask("CLIENT", "ID") != ended


def test_threads_ask_beside_each_other_and_get_their_own_answers(connections: OwnConnections) -> None:
    answers: dict[int, set[bytes]] = {}

    def ask(number: int) -> None:
        answers[number] = {connections.ask("ECHO", f"{number}") for _ in range(200)}

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: {str(number).encode()} for number in range(4)}
    connections.close()
    assert connections.ask("PING") == b"PONG"


def test_a_fork_has_connections_of_its_own(connections: OwnConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = connections.ask("CLIENT", "ID")
    assert connections.heard("w", {"onbeat:wake:w"}, 0.01) == {"onbeat:wake:w"}
    assert connections.heard("w", {"onbeat:wake:w"}, 0.01) == set()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert connections.ask("CLIENT", "ID") != mine
    assert connections.heard("w", {"onbeat:wake:w"}, 0.01) == {"onbeat:wake:w"}  # new to a connection of its own


def test_commands_that_belong_together_are_repeated_together(
    connections: OwnConnections, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connections._take()
    connections._idle.append(connection)
    honest, num_read = connection.read_response, iter(range(100))

    def cut(*arguments: Any, **options: Any) -> Any:
        if next(num_read) == 1:
            raise ConnectionError("the answer of the second was lost")
        return honest(*arguments, **options)

    monkeypatch.setattr(connection, "read_response", cut)
    assert connections.ask_all(("INCR", job_id), ("GET", job_id)) == [2, b"2"]


def test_of_commands_that_belong_together_each_answer_is_read_where_one_is_an_error(
    connections: OwnConnections, job_id: str
) -> None:
    with pytest.raises(ResponseError, match="unknown command"):
        connections.ask_all(("NO-SUCH",), ("INCR", job_id))
    assert connections.ask("GET", job_id) == b"1"
