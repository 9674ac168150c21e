"""What threads of both pools do: results in order, a fault of their own, the end."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from onbeat.base.cage.caged_process import ChildDied
from reward_service.cages import Asked, Cages, CageThread

CAGES = Cages("rewards", memory_mb=64, network=False, hidden=(), readable=(), on_restart=lambda: None)
DEADLINE_S = 60.0


class FakeCage:
    pid = 7

    def __init__(self) -> None:
        self.said: list[str] = []

    def kill(self) -> None:
        self.said.append("kill")

    def end(self) -> None:
        self.said.append("end")


class Doubles(CageThread[Asked[int, int], Any]):
    """Answers twice each number, and fails at a negative one."""

    def __init__(self) -> None:
        self.made: list[FakeCage] = []
        super().__init__(name="doubles-1", cages=CAGES, new_cage=self._made)
        self.queue: SimpleQueue[Asked[int, int] | None] = SimpleQueue()

    def _made(self) -> FakeCage:
        self.made.append(FakeCage())
        return self.made[-1]

    def _next(self) -> tuple[Asked[int, int], Sequence[int]] | None:
        asked = self.queue.get(timeout=DEADLINE_S)
        return None if asked is None else (asked, range(len(asked.asks)))

    def _answer(self, work: Asked[int, int], places: Sequence[int]) -> None:
        self._cage(work.cage_key)
        for place in places:
            if work.asks[place] < 0:
                raise StopIteration
            work.deliver(place, 2 * work.asks[place])


def test_a_fault_of_a_thread_costs_its_request_and_its_cage_and_the_thread_lives_on() -> None:
    thread = Doubles()
    thread.start()
    fine, broken, after = (
        Asked[int, int](asks=asks, cage_key=key) for asks, key in (((1, 2), "a"), ((3, -1), "b"), ((4,), "b"))
    )
    for asked in (fine, broken, after, None):
        thread.queue.put(asked)
    thread.join(DEADLINE_S)
    assert fine.future.result(DEADLINE_S) == (2, 4)
    with pytest.raises(RuntimeError, match=r"thread doubles-1 failed: StopIteration"):
        broken.future.result(DEADLINE_S)
    assert after.future.result(DEADLINE_S) == (8,)
    assert [cage.said for cage in thread.made] == [["end"], ["end"], ["end"]]
    assert thread.pids() == []


def test_a_stopped_thread_has_killed_its_cages_and_starts_no_other() -> None:
    thread = Doubles()
    thread._answer(Asked(asks=(1,)), (0,))
    assert thread.pids() == [7]
    thread.stop()
    with pytest.raises(ChildDied, match="the scorer pool was closed"):
        thread._answer(Asked(asks=(1,)), (0,))
    assert [cage.said for cage in thread.made] == [["kill"]]


def test_what_many_threads_deliver_is_one_answer_in_order() -> None:
    asked = Asked[int, int](asks=range(1000))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda place: asked.deliver(place, 2 * place), reversed(range(1000))))
    assert asked.future.result(DEADLINE_S) == tuple(range(0, 2000, 2))


def test_a_request_that_is_over_stays_as_it_is() -> None:
    given_up, failed = Asked[int, int](asks=(1,)), Asked[int, int](asks=(1,))
    assert given_up.future.cancel()
    failed.fail(ValueError("first"))
    for asked in (given_up, failed):
        asked.deliver(0, 2)
        asked.fail(ValueError("second"))
    assert given_up.future.cancelled()
    with pytest.raises(ValueError, match="first"):
        failed.future.result(DEADLINE_S)
