"""What is asked again after a pause, and for how long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from onbeat.base.process.waiting import backoff, run_apart, tried_again


class Asked:
    """Fails by the errors in their order, then answers; remembers the pauses."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.num_asked = 0
        self.slept_s: list[float] = []

    async def ask(self) -> str:
        self.num_asked += 1
        if self._errors:
            raise self._errors.pop(0)
        return "answer"

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)

    def tried(self, pauses: Sequence[float]) -> str:
        def helps(error: Exception, pause_s: float) -> bool:
            return isinstance(error, OSError) and pause_s < 5.0

        return asyncio.run(tried_again("it", self.ask, pauses=pauses, helps=helps, sleep=self.sleep))


def test_it_is_asked_again_after_each_pause_until_it_answers() -> None:
    asked = Asked(OSError("one"), OSError("two"))
    assert asked.tried([1.0, 2.0, 3.0]) == "answer"
    assert (asked.num_asked, asked.slept_s) == (3, [1.0, 2.0])


def test_the_error_after_the_last_pause_is_raised() -> None:
    asked = Asked(OSError("one"), OSError("two"), OSError("three"))
    with pytest.raises(OSError, match="two"):
        asked.tried([1.0])
    assert (asked.num_asked, asked.slept_s) == (2, [1.0])


@pytest.mark.parametrize(("error", "pause_s"), [(ValueError("no"), 1.0), (OSError("too late"), 5.0)])
def test_what_another_try_does_not_fix_is_raised_at_once(error: Exception, pause_s: float) -> None:
    asked = Asked(error)
    with pytest.raises(type(error)):
        asked.tried([pause_s, 1.0])
    assert (asked.num_asked, asked.slept_s) == (1, [])


def test_pauses_double_up_to_the_longest_however_many_there_are() -> None:
    pauses = list(itertools.islice(backoff(base_s=0.5, cap_s=5.0, jitter=lambda: 1.0), 5000))
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert set(pauses[5:]) == {5.0}


async def test_a_caller_with_a_loop_of_its_own_may_run_another_apart() -> None:
    async def inner() -> int:
        return id(asyncio.get_running_loop())

    assert run_apart(inner()) != id(asyncio.get_running_loop())
