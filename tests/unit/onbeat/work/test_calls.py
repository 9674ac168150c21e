"""How long a generator outlasts a broker that is away."""

from __future__ import annotations

import asyncio

import pytest

from contracts.errors import BrokerFull, BrokerUnavailable, OnbeatError
from onbeat.work.calls import BrokerCalls


class Server:
    """Answers after `failures` errors; its clock moves by what callers sleep."""

    def __init__(self, error: OnbeatError, *, failures: int) -> None:
        self.error = error
        self.failures = failures
        self.calls = 0
        self.now_s = 0.0

    def answer(self, value: int) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return value

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def ask(self) -> int:
        async def run() -> int:
            calls = BrokerCalls(timeout_s=30.0, full_timeout_s=300.0, clock=lambda: self.now_s, sleep=self.sleep)
            try:
                return await calls(self.answer, 42)
            finally:
                calls.close()

        return asyncio.run(run())


@pytest.mark.parametrize("error", [BrokerUnavailable("refused"), BrokerFull("maxmemory")])
def test_a_short_outage_is_outlasted(error: OnbeatError) -> None:
    server = Server(error, failures=8)
    assert server.ask() == 42
    assert server.calls == 9


@pytest.mark.parametrize(("error", "patience_s"), [(BrokerUnavailable("refused"), 30.0), (BrokerFull("full"), 300.0)])
def test_an_outage_beyond_the_deadline_is_an_error_and_a_full_server_has_a_later_one(
    error: OnbeatError, patience_s: float
) -> None:
    server = Server(error, failures=10_000)
    with pytest.raises(type(error)):
        server.ask()
    assert patience_s <= server.now_s <= patience_s + 2.0
