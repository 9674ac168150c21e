"""A call of the broker ends when it should, whatever its server does, and says what it waits for (I8)."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError

from broker.connection.client import Broker, connect, connect_within
from broker.connection.deadlines import DeadlineRetry, Patience, within
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
        (ResponseError("some words", status_code="CLUSTERDOWN"), BrokerUnavailable),
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
