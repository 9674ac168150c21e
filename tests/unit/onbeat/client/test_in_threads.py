"""What takes something for an event loop: a cancelled call loses nothing, and one that failed is over."""

from __future__ import annotations

import asyncio
import threading

import pytest

from contracts.errors import BrokerUnavailable
from onbeat.client.in_threads import Taking


async def test_what_a_cancelled_call_takes_is_the_next_ones_answer() -> None:
    gate = threading.Event()

    def slow() -> str:
        assert gate.wait(120.0)
        return "first"

    taking: Taking[str] = Taking()
    early = asyncio.ensure_future(taking(slow))
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    gate.set()
    assert [await taking(lambda: "second") for _ in range(2)] == ["first", "second"]


async def test_a_call_that_fails_is_tried_anew_and_so_is_one_that_failed_after_it_was_cancelled() -> None:
    gate = threading.Event()

    def away() -> str:
        assert gate.wait(120.0)
        raise BrokerUnavailable("connection refused")

    taking: Taking[str] = Taking()
    early = asyncio.ensure_future(taking(away))
    await asyncio.sleep(0)
    early.cancel()
    gate.set()
    for _ in range(2):
        with pytest.raises(BrokerUnavailable):
            await taking(away)
    assert await taking(lambda: "found") == "found"
