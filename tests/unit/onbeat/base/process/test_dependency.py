"""A service that is away is outlasted; only one that answers others leaves a request in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from contracts.errors import RewardUnavailable, Unavailable
from onbeat.base.process.dependency import REWARD_SERVICE, SLOW_S, Dependency


def in_doubt(problem: Unavailable) -> Unavailable:
    problem.is_doubtful = True
    return problem


class Played:
    """A service that answers, or doesn't, as a test says, on a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.problems: list[Unavailable] = []
        """Raised by the next requests, in order."""
        self.is_up = True
        """Whether a probe is answered."""
        self.num_probes = 0
        self.service = Dependency(
            REWARD_SERVICE, "http://r", probe=self.probe, jitter=lambda: 0.0, clock=lambda: self.now_s
        )

    async def probe(self) -> None:
        self.num_probes += 1
        if not self.is_up:
            raise RewardUnavailable("no answer: ConnectError")

    async def ask(self) -> str:
        self.now_s += 1.0
        if self.problems:
            raise self.problems.pop(0)
        return "scored"

    def outlast(self, **options: Any) -> Awaitable[str]:
        return self.service.outlast(self.ask, **{"deadline_s": 60.0} | options)


@pytest.fixture
def played() -> Played:
    return Played()


async def test_absence_is_outlasted_and_what_is_known_of_it_goes_with_the_first_answer(played: Played) -> None:
    played.problems = [RewardUnavailable("503"), RewardUnavailable("no answer:\nConnectError")]
    asked = asyncio.ensure_future(played.outlast())
    while len(played.problems):
        await asyncio.sleep(0)
    assert played.service.why in ("at http://r: no answer: ConnectError", "")
    assert await asked == "scored"
    assert (played.service.is_away, played.service.why, played.num_probes) == (False, "", 0)
    assert (played.service.seen.away_s, played.service.seen.answered_s) == (None, 0.0)


async def test_past_its_deadline_the_absence_is_raised_and_is_not_in_doubt(played: Played) -> None:
    played.problems = [RewardUnavailable("503")] * 9
    with pytest.raises(RewardUnavailable) as found:
        await played.outlast(deadline_s=3.5)
    assert not found.value.is_doubtful
    assert len(played.problems) == 5, "four requests in as many seconds"
    assert (played.service.seen.away_s, played.service.seen.answered_s) == (3.0, None)


async def test_what_a_service_that_answers_others_leaves_unanswered_is_in_doubt_at_once(played: Played) -> None:
    played.problems = [in_doubt(RewardUnavailable("broken off"))]
    with pytest.raises(RewardUnavailable) as found:
        await played.outlast()
    assert found.value.is_doubtful
    assert not played.service.is_away
    played.is_up = False
    played.problems = [in_doubt(RewardUnavailable("broken off")) for _ in range(5)]
    assert await played.outlast() == "scored", "a service that died of something else is waited for"


async def test_a_wait_ends_where_others_reach_the_service_or_nobody_needs_the_answer(played: Played) -> None:
    played.problems = [RewardUnavailable("no answer")] * 3
    with pytest.raises(RewardUnavailable):
        await played.outlast(is_needed=lambda: False)
    played.service.reached_by_others()
    with pytest.raises(RewardUnavailable) as found:
        await played.outlast()
    assert not found.value.is_doubtful
    assert len(played.problems) == 1, "one request each"
    played.service.answered()
    assert not played.service.others_reach


async def test_it_is_asked_after_only_while_there_is_a_reason(played: Played) -> None:
    await played.service.look()
    assert played.num_probes == 0
    played.service.others_miss = True
    await played.service.look()
    assert (played.num_probes, played.service.seen.answered_s) == (1, 0.0)
    played.service.others_miss = False
    played.service.missed(RewardUnavailable("no answer"))
    played.is_up = False
    await played.service.look()
    assert (played.num_probes, played.service.is_away) == (2, True)
    played.is_up = True
    await played.service.look()
    assert not played.service.is_away


async def test_a_request_that_takes_long_has_its_service_asked_after(played: Played) -> None:
    gate = asyncio.Event()

    async def hangs() -> str:
        await gate.wait()
        return "scored"

    asked = asyncio.ensure_future(played.service.outlast(hangs, deadline_s=60.0))
    await asyncio.sleep(0)
    await played.service.look()
    assert played.num_probes == 0
    played.now_s += SLOW_S + 1.0
    played.is_up = False
    await played.service.look()
    assert (played.num_probes, played.service.is_away) == (1, True)
    gate.set()
    assert await asked == "scored"
    assert not played.service.is_away
