"""Sessions in real caged children: a hostile environment costs its own session, and the others go on as they were."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.played import PLUGIN, asked, new, reason_of, reply_of, text_of

COSTS = {
    "hang": "timeout",
    "die": "crashed",
    "leave": "crashed",
    "close": "crashed",
    "babble": "crashed",
    "exit": "raised",
    "raise": "raised",
    "memory": "raised",
    "nan": "invalid_reply",
    "assistant": "invalid_reply",
    "number": "invalid_reply",
    "wrong_content": "invalid_reply",
    "wrong_record": "invalid_reply",
    "surrogate": "invalid_reply",
    "evil": "invalid_reply",
    "thread": "invalid_reply",
    "timer": "invalid_reply",
    "huge": "oversize",
    "print": "turned",
    "fork": "turned",
    "mutate": "turned",
}


@pytest.fixture(autouse=True)
def plugins(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(PLUGIN))
    return PLUGIN


def test_a_hostile_session_costs_itself_and_the_others_go_on_as_they_were() -> None:
    async def run() -> None:
        async with asked() as ask:
            for number, (act, reason) in enumerate(COSTS.items()):
                await ask.open("nasty", *(new(one) for one in range(4)), limit_s=1.0)
                first = await ask.step(0, {0: "a", 1: "b", 2: "c", 3: "3"})
                assert {reason_of(one) for one in first.values()} == {"turned"}, act
                found = await ask.step(1, {0: "d", 1: "1", 2: act, 3: "3"})
                assert reason_of(found.pop(2)) == reason, act
                assert [text_of(one) for one in found.values()] == ["a d", "b 1", "3 3"], act
                assert [reply_of(one).reward for one in found.values()] == [0.0, 1.0, 1.0], act
                last = await ask.step(2, {0: "e", 3: "f"})
                assert [text_of(one) for one in last.values()] == ["a d e", "3 3 f"], (number, act)

    asyncio.run(run())
