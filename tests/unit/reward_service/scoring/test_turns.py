"""Threads go to jobs by the time that they used, and none has more than half while another one waits."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.scoring.turns import CONFINED_S, PATIENCE_S, Turns
from tests.chaos.short_job import IS_LONG


class Request:
    """So many items of a job."""

    def __init__(self, owner: str, num_items: int) -> None:
        self.owner = owner
        self.waits_since_s = 0.0
        self.items = deque(range(num_items))
        self.is_over = False
        self.is_open = True

    @property
    def num_waiting(self) -> int:
        return len(self.items)

    def take(self, most: int) -> Sequence[int]:
        return [self.items.popleft()]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def owner_of(turn: tuple[Request, Sequence[int]] | None) -> str:
    return turn[0].owner if turn else ""


def threads_of(turns: Turns[Request], threads: int) -> Counter[str]:
    """Gives each thread a turn."""
    return Counter(owner_of(turns.take(thread, None)) for thread in range(threads))


@pytest.mark.parametrize(("threads", "shares"), [(2, (1, 1)), (3, (2, 1)), (4, (2, 2)), (8, (4, 4))])
def test_two_jobs_that_wait_have_half_of_the_threads_each_however_many_requests_one_of_them_has(
    threads: int, shares: tuple[int, int]
) -> None:
    turns: Turns[Request] = Turns(threads, clock=Clock())
    for _ in range(10):
        turns.add(Request("greedy", 100))
    turns.add(Request("other", 100))
    assert sorted(threads_of(turns, threads).values(), reverse=True) == list(shares)


def test_a_job_that_waits_alone_has_every_thread() -> None:
    turns: Turns[Request] = Turns(4, clock=Clock())
    turns.add(Request("alone", 100))
    assert threads_of(turns, 4) == {"alone": 4}


def test_of_two_jobs_the_one_that_used_less_time_comes_first() -> None:
    clock = Clock()
    turns: Turns[Request] = Turns(2, clock=clock)
    slow, quick = Request("slow", 1000), Request("quick", 1000)
    turns.add(slow)
    turns.add(quick)
    used_s = {"slow": 0.0, "quick": 0.0}
    for _ in range(200):
        owner = owner_of(turns.take("thread", None))
        seconds = 1.0 if owner == "slow" else 0.1
        used_s[owner] += seconds
        clock.now_s += seconds
        turns.end("thread")
    assert used_s["slow"] == pytest.approx(used_s["quick"], abs=1.1)


def test_a_turn_that_holds_up_another_job_is_taken_back_and_its_job_stays_within_half_for_a_while() -> None:
    clock = Clock()
    turns: Turns[Request] = Turns(2, clock=clock)
    hog, honest = Request("hog", 100), Request("honest", 8)
    turns.add(hog)
    assert threads_of(turns, 2) == {"hog": 2}
    clock.now_s = 100.0
    turns.add(honest)
    assert turns.overdue() is None
    clock.now_s += PATIENCE_S
    overdue = turns.overdue()
    assert overdue is not None
    thread, turn = overdue
    assert turn.request is hog
    turns.end(thread)
    assert owner_of(turns.take(thread, None)) == "honest"
    clock.now_s += PATIENCE_S
    assert turns.overdue() is None, "the other thread of the hog is its own"
    turns.end(thread)
    honest.is_over = True
    assert turns.take(thread, None) is None, "the thread stays free for the next request"
    clock.now_s += CONFINED_S
    assert owner_of(turns.take(thread, None)) == "hog"


def test_a_request_that_was_put_back_waits_again_once() -> None:
    turns: Turns[Request] = Turns(2, clock=Clock())
    request = Request("job", 2)
    turns.add(request)
    turns.take("thread", None)
    turns.put_back(request)
    assert turns.waiting == [request]


@settings(max_examples=200 if IS_LONG else 50, deadline=None)
@given(threads=st.integers(2, 6), jobs=st.lists(st.sampled_from([0.5, 2.0, 600.0]), min_size=2, max_size=5))
def test_no_job_stands_still_while_fewer_jobs_than_threads_have_long_items(threads: int, jobs: list[float]) -> None:
    """The jobs come one after the other, so that the first ones have every thread by then."""
    clock = Clock()
    turns: Turns[Request] = Turns(threads, clock=clock)
    item_s = {f"job {number}": seconds for number, seconds in enumerate(jobs)}
    ends_s: dict[int, float] = {}
    begun_s: dict[str, float] = {}
    for owner in item_s:
        turns.add(Request(owner, 10**6))
        for _ in range(400):
            for thread in range(threads):
                if ends_s.get(thread, 0.0) > clock.now_s:
                    continue
                turns.end(thread)
                turn = turns.take(thread, None)
                if turn is not None:
                    begun_s[turn[0].owner] = clock.now_s
                    ends_s[thread] = clock.now_s + item_s[turn[0].owner]
            overdue = turns.overdue()
            if overdue is not None:
                assert isinstance(overdue[0], int)
                ends_s[overdue[0]] = clock.now_s
            clock.now_s += 0.5
    if jobs.count(600.0) < threads:
        for owner, seconds in item_s.items():
            assert seconds == 600.0 or clock.now_s - begun_s[owner] < 6 * PATIENCE_S, (owner, item_s)
