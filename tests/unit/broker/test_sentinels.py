"""What a process believes of its sentinels: the newest failover, one answer for all, and the reason of each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ConnectionError, ResponseError, TimeoutError

from broker.connection import sentinels
from broker.connection.sentinels import Primary, at_primary

PLACES = (("one", 1), ("two", 2), ("three", 3))
OLD, NEW = ("old", 6379), ("new", 6379)


def knows(place: tuple[str, int], epoch: int, *, is_down: bool = False) -> dict[str, Any]:
    state = {"config-epoch": epoch, "is_sdown": is_down, "down-after-milliseconds": 1500}
    return {"ip": place[0], "port": place[1]} | state


class Told:
    """Host → what its sentinel answers or raises; every question is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, Any] = {host: knows(OLD, 1) for host, _ in PLACES}
        self.asked: list[str] = []
        monkeypatch.setattr(Redis, "sentinel_master", lambda client, name: self._answer(client, name))
        monkeypatch.setattr(sentinels, "SHARED_S", 0.0)
        monkeypatch.setattr(sentinels, "LOOK_S", 0.0)

    def _answer(self, client: Redis, name: str) -> Any:
        host = client.connection_pool.connection_kwargs["host"]
        self.asked.append(host)
        answer = self.answers[host]
        if isinstance(answer, Callable):
            answer = answer()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


@pytest.fixture
def primary(told: Told) -> Primary:
    made = Primary("onbeat", PLACES, {})
    assert made.find(within_s=5.0) == OLD
    return made


def test_a_failover_counts_once_one_sentinel_tells_it_and_an_older_answer_no_more(told: Told, primary: Primary) -> None:
    told.answers["two"] = knows(NEW, 2)
    assert any(primary.has_left(OLD) for _ in PLACES)
    told.answers |= {"two": TimeoutError(), "three": TimeoutError()}
    for _ in range(6):
        assert primary.find(within_s=5.0) == NEW
        assert not primary.has_left(NEW)


def test_a_sentinel_that_does_not_hear_the_primary_is_no_last_word(told: Told, primary: Primary) -> None:
    """Who leads the failover names the old one to its end; who hears of it names the new one at once."""
    told.answers = dict.fromkeys(told.answers, knows(OLD, 2, is_down=True)) | {"three": knows(NEW, 2)}
    for _ in range(3):
        assert primary.find(within_s=5.0) == NEW
    told.answers = dict.fromkeys(told.answers, knows(NEW, 2, is_down=True))
    assert primary.find(within_s=5.0) == NEW


def test_an_older_primary_counts_where_all_sentinels_know_it(told: Told, primary: Primary) -> None:
    """They were set up anew."""
    told.answers = dict.fromkeys(told.answers, knows(NEW, 5))
    assert primary.find(within_s=5.0) == NEW
    told.answers = dict.fromkeys(told.answers, knows(OLD, 0))
    assert primary.find(within_s=5.0) == OLD


def test_a_sentinel_that_is_none_or_refuses_is_passed_over(told: Told, primary: Primary) -> None:
    told.answers |= {"one": ResponseError("unknown command 'SENTINEL'"), "two": AuthenticationError()}
    for _ in range(3):
        assert primary.find(within_s=5.0) == OLD
    told.answers["three"] = TimeoutError()
    with pytest.raises(ConnectionError, match="no sentinel reports where the primary `onbeat` is") as error:
        primary.find(within_s=5.0)
    for reason in ("one:1 says: unknown command", "two:2 refuses the password", "three:3 does not answer"):
        assert reason in str(error.value)


def test_what_one_connection_was_told_counts_for_the_next_and_so_does_that_there_was_no_answer(
    told: Told, primary: Primary, monkeypatch: pytest.MonkeyPatch
) -> None:
    told.answers = dict.fromkeys(told.answers, TimeoutError())
    with pytest.raises(ConnectionError):
        primary.find(within_s=5.0)
    monkeypatch.setattr(sentinels, "SHARED_S", 600.0)
    told.asked.clear()
    for _ in range(3):
        with pytest.raises(ConnectionError):
            primary.find(within_s=5.0)
    assert told.asked == []


def test_sentinels_that_wait_too_short_for_a_server_that_they_promoted_are_named_once(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    told.answers = {host: answer | {"down-after-milliseconds": 1000} for host, answer in told.answers.items()}
    primary = Primary("onbeat", PLACES, {})
    for _ in range(3):
        primary.find(within_s=5.0)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "`onbeat`: set down-after-milliseconds to 1500 or more"
    ]


def test_a_look_ends_with_the_time_that_the_call_has(told: Told, primary: Primary) -> None:
    told.answers = dict.fromkeys(told.answers, TimeoutError())
    told.asked.clear()
    with pytest.raises(ConnectionError, match="no time was left"):
        primary.find(within_s=0.0)
    assert told.asked == []


def test_a_primary_that_takes_no_connection_is_given_half_a_second_and_then_looked_for_anew(
    told: Told, primary: Primary
) -> None:
    """A host that was cut off answers nothing: the next connection may find the one that was promoted meanwhile."""
    tried: list[tuple[Any, ...]] = []

    class Connection:
        host, port = "", 0
        socket_connect_timeout = 5.0

        def _connect(self) -> None:
            tried.append((self.host, self.port, self.socket_connect_timeout))

    connection = at_primary(Connection, primary)()
    connection._connect()
    told.answers = dict.fromkeys(told.answers, knows(NEW, 2))
    connection._connect()
    assert tried == [(*OLD, 0.5), (*NEW, 0.5)]


def test_a_wait_for_an_answer_stands_in_no_queue_behind_another_threads_look(told: Told, primary: Primary) -> None:
    asking, go_on = threading.Event(), threading.Event()

    def hang() -> Exception:
        asking.set()
        go_on.wait(120.0)
        return TimeoutError()

    told.answers = dict.fromkeys(told.answers, hang)
    look = threading.Thread(target=primary.has_left, args=(OLD,))
    look.start()
    assert asking.wait(120.0)
    assert not primary.has_left(OLD)
    assert primary.has_left(NEW)
    go_on.set()
    look.join()
