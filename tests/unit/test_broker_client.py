"""A Redis that doesn't answer is waited for aloud, and not for ever (I8)."""

from __future__ import annotations

import logging

import pytest
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from broker.client import AudibleRetry


class Outage:
    """A server that refuses so many calls, each at the next of these times."""

    def __init__(self, num_refused: int, *, step_s: float) -> None:
        self.num_refused = num_refused
        self.now_s = 0.0
        self._step_s = step_s

    def call(self) -> str:
        self.now_s += self._step_s
        if self.num_refused:
            self.num_refused -= 1
            raise ConnectionError("refused")
        return "answer"

    def retry(self, retries: int) -> AudibleRetry:
        retry = AudibleRetry(NoBackoff(), retries)
        retry.clock = lambda: self.now_s
        return retry


def test_a_server_that_stays_away_is_said_once_with_how_long_so_far(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    outage = Outage(6, step_s=4.0)
    assert outage.retry(10).call_with_retry(outage.call, lambda _error: None) == "answer"
    assert [record.getMessage() for record in caplog.records] == ["waiting for Redis to answer, 12 s so far: refused"]


def test_a_short_outage_is_not_worth_a_line_and_a_long_one_ends(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(6, step_s=1.0)
    assert outage.retry(10).call_with_retry(outage.call, lambda _error: None) == "answer"
    assert caplog.records == []
    endless = Outage(1000, step_s=1.0)
    with pytest.raises(ConnectionError):
        endless.retry(3).call_with_retry(endless.call, lambda _error: None)
    assert endless.now_s == 4.0
