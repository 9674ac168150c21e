"""A call of the broker ends when it should, whatever its server does, and says what it waits for (I8)."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError

from broker.connection.client import Broker, connect, connect_within
from broker.connection.deadlines import BoundedSocket, DeadlineRetry, Patience, within
from broker.connection.server_errors import UNAVAILABLE, translated
from contracts.errors import BrokerFull, BrokerUnavailable, FenceViolation, InvalidInput, OnbeatError
from contracts.settings import StackSettings


class Outage:
    """A server that refuses so many calls, each at the next of these times."""

    def __init__(self, num_refused: int, *, step_s: float, error: Exception | None = None) -> None:
        self.num_refused = num_refused
        self.now_s = 0.0
        self._step_s = step_s
        self._error = error or ConnectionError("refused")

    def call(self) -> str:
        self.now_s += self._step_s
        if self.num_refused:
            self.num_refused -= 1
            raise self._error
        return "answer"

    def ask(self, *, patience_s: float) -> str:
        patience = Patience(patience_s, clock=lambda: self.now_s)
        return DeadlineRetry(NoBackoff(), patience).call_with_retry(self.call, lambda _error: None)


class BlackHole:
    """Takes connections and bytes, and never answers, as a stopped server does, or one that waits for TLS."""

    def __init__(self) -> None:
        self.taken: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://:secret-word@127.0.0.1:{self._listener.getsockname()[1]}/0"

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self.taken):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                self.taken.append(self._listener.accept()[0])
            except OSError:
                return


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    hole = BlackHole()
    yield hole
    hole.close()


def test_a_server_that_stays_away_is_said_once_with_how_long_so_far(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    outage = Outage(6, step_s=4.0)
    assert outage.ask(patience_s=60.0) == "answer"
    assert [record.getMessage() for record in caplog.records] == ["waiting for Redis to answer, 12 s so far: refused"]


def test_a_short_outage_is_not_worth_a_line_and_a_long_one_ends(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(6, step_s=1.0)
    assert outage.ask(patience_s=10.0) == "answer"
    assert caplog.records == []
    endless = Outage(1000, step_s=1.0)
    with pytest.raises(ConnectionError):
        endless.ask(patience_s=4.0)
    assert endless.now_s == 4.0


def test_attempts_that_take_long_don_t_multiply_the_patience() -> None:
    hanging = Outage(1000, step_s=15.0)
    with pytest.raises(ConnectionError):
        hanging.ask(patience_s=3.0)
    assert hanging.now_s == 15.0


def test_a_nearer_end_of_the_caller_is_kept() -> None:
    endless = Outage(1000, step_s=1.0)
    with pytest.raises(ConnectionError), within(2.0, clock=lambda: endless.now_s):
        endless.ask(patience_s=100.0)
    assert endless.now_s == 2.0


@pytest.mark.parametrize("error", [AuthenticationError("no"), ResponseError("WRONGTYPE Operation against a key")])
def test_what_does_not_pass_is_not_tried_again(error: Exception) -> None:
    outage = Outage(1000, step_s=1.0, error=error)
    with pytest.raises(type(error)):
        outage.ask(patience_s=100.0)
    assert outage.now_s == 1.0


def test_a_server_that_refuses_for_now_is_asked_again() -> None:
    assert Outage(3, step_s=1.0, error=ResponseError("BUSY Redis is busy running a script")).ask(patience_s=9.0)


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        *((ResponseError(f"{word} some words"), BrokerUnavailable) for word in UNAVAILABLE),
        (ResponseError("some words", status_code="CLUSTERDOWN"), InvalidInput),
        (ResponseError("some words", status_code="NOREPLICAS"), BrokerUnavailable),
        (ResponseError("Command # 1 (PING) of pipeline caused error: MISCONF Errors writing"), BrokerUnavailable),
        (ResponseError("OOM command not allowed"), BrokerFull),
        (ResponseError("3999 127.0.0.1:6381", status_code="MOVED"), InvalidInput),
        (ResponseError("ERR the word BUSY inside"), FenceViolation),
        (ResponseError("BUSYGROUP there is one"), FenceViolation),
    ],
)
def test_each_error_of_a_server_has_its_meaning(error: Exception, ours: type[OnbeatError]) -> None:
    with pytest.raises(ours), translated():
        raise error


def test_a_server_that_takes_connections_and_never_answers_costs_one_attempt(black_hole: BlackHole) -> None:
    settings = StackSettings(redis_url=black_hole.url, broker_timeout_s=0.5)
    with pytest.raises(BrokerUnavailable, match="does not answer"):
        connect(settings, patience_s=0.5)
    assert len(black_hole.taken) == 1


def test_a_process_that_starts_gives_up_a_silent_server_at_its_deadline(black_hole: BlackHole) -> None:
    with pytest.raises(OnbeatError, match="Redis to answer"):
        connect_within(StackSettings(redis_url=black_hole.url, broker_timeout_s=0.5), patience_s=1000.0)
    assert len(black_hole.taken) == 1


def test_a_call_that_waits_in_another_thread_is_broken_off(settings: StackSettings) -> None:
    broker = connect(settings, patience_s=1000.0)
    ended: list[Exception] = []

    def wait(broker: Broker) -> None:
        try:
            with broker.call(blocks_s=1000.0):
                broker.redis.blpop(["a-list-that-nobody-fills"], timeout=0)
        except BrokerUnavailable as error:
            ended.append(error)

    waiting = threading.Thread(target=wait, args=(broker,))
    waiting.start()
    while not broker.redis.info("clients")["blocked_clients"]:
        time.sleep(0.01)
    broker.break_off()
    waiting.join()
    assert len(ended) == 1
    with pytest.raises(BrokerUnavailable):
        broker.ping()


def test_once_a_process_hurries_calls_that_wait_and_calls_that_come_end_in_the_time_that_is_left_to_them() -> None:
    now_s = 0.0
    patience = Patience(60.0, clock=lambda: now_s)
    with patience.call():
        now_s = 5.0
        assert patience.left_s == 55.0
        patience.hurry(4.0)
        assert patience.left_s == 4.0, "it has waited since before"
        now_s = 8.0
        assert patience.left_s == 1.0
    now_s = 1000.0
    with patience.call():
        assert patience.left_s == 4.0, "it begins now"


class SlowLink:
    """A socket that moves so many bytes at each call, and lets so much time pass."""

    def __init__(self, bytes_at_once: int, *, step_s: float) -> None:
        self.bytes_at_once, self.step_s, self.now_s = bytes_at_once, step_s, 0.0

    def settimeout(self, seconds: float) -> None:
        """It never waits."""

    def send(self, data: memoryview) -> int:
        self.now_s += self.step_s
        return min(len(data), self.bytes_at_once)

    def recv_into(self, buffer: bytearray) -> int:
        self.now_s += self.step_s
        return min(len(buffer), self.bytes_at_once)

    def move(self, num_bytes: int, *, patience_s: float, sends: bool = True) -> None:
        """One call that sends, or receives, so much."""
        patience = Patience(patience_s, clock=lambda: self.now_s)
        link: Any = self
        bounded_socket = BoundedSocket(link, patience, lambda: False)

        def attempt() -> None:
            if sends:
                return bounded_socket.sendall(bytes(num_bytes))
            left = num_bytes
            while left > 0:
                left -= bounded_socket.recv_into(bytearray(left))

        with patience.call():
            DeadlineRetry(NoBackoff(), patience).call_with_retry(attempt, lambda _error: None)


@pytest.mark.parametrize("sends", [True, False])
def test_bytes_that_trickle_do_not_outlast_the_call(sends: bool) -> None:
    link = SlowLink(1, step_s=0.1)
    with pytest.raises(TimeoutError):
        link.move(1000, patience_s=3.0, sends=sends)
    assert 3.0 < link.now_s < 4.0


@pytest.mark.parametrize("sends", [True, False])
def test_a_large_payload_gets_the_time_that_a_slow_link_needs(sends: bool) -> None:
    link = SlowLink(1 << 20, step_s=0.5)
    link.move(40 << 20, patience_s=3.0, sends=sends)
    assert link.now_s == 20.0


def test_repeats_of_a_large_payload_earn_no_more_time_than_one() -> None:
    link = SlowLink(1 << 20, step_s=0.5)
    patience = Patience(3.0, clock=lambda: link.now_s)
    socket_: Any = link
    bounded_socket = BoundedSocket(socket_, patience, lambda: False)

    def attempt() -> None:
        bounded_socket.sendall(bytes(8 << 20))
        raise ConnectionError("gone")

    with pytest.raises((ConnectionError, TimeoutError)), patience.call():
        DeadlineRetry(NoBackoff(), patience).call_with_retry(attempt, lambda _error: None)
    assert link.now_s < 20.0


class Trickle(BlackHole):
    """Answers each command with a text of a megabyte, a byte at a time, and never comes to its end."""

    def _accept(self) -> None:
        while True:
            try:
                taken = self._listener.accept()[0]
            except OSError:
                return
            self.taken.append(taken)
            threading.Thread(target=self._answer, args=(taken,), daemon=True).start()

    def _answer(self, taken: socket.socket) -> None:
        try:
            taken.recv(1 << 16)
            taken.sendall(b"$1000000\r\n")
            while True:
                taken.sendall(b"x")
                time.sleep(0.01)
        except OSError:
            return


def test_a_server_that_answers_by_drops_is_one_that_does_not_answer() -> None:
    trickle = Trickle()
    try:
        with pytest.raises(BrokerUnavailable, match="does not answer"):
            connect(StackSettings(redis_url=trickle.url), patience_s=0.5)
    finally:
        trickle.close()
