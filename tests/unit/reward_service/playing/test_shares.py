"""Sessions are shared among jobs: half for each where two want them."""

from __future__ import annotations

from reward_service.playing.shares import WANTED_S, Shares


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_job_alone_takes_all_and_another_one_comes_in_as_the_first_gives_back() -> None:
    shares = Shares(8, clock=Clock())
    assert [shares.take("first", 4) for _ in range(3)] == [True, True, False]
    assert not shares.take("other", 2), "none is free"
    shares.give_back("first", 1)
    assert not shares.take("first", 1), "it has more than half, and another job wants some"
    shares.give_back("first", 1)
    assert shares.take("other", 2)
    assert not shares.take("first", 1)
    for _ in range(3):
        shares.give_back("first", 1)
    assert shares.take("first", 1)
    assert shares.num_taken == 6


def test_a_job_that_was_refused_and_asks_no_more_is_forgotten() -> None:
    clock = Clock()
    shares = Shares(4, clock=clock)
    assert shares.take("first", 3)
    assert not shares.take("other", 2)
    assert not shares.take("first", 1)
    clock.now_s = WANTED_S
    assert shares.take("first", 1)


def test_a_job_without_any_may_begin_a_batch_that_needs_more_than_half() -> None:
    shares = Shares(8, clock=Clock())
    assert shares.take("small", 2)
    assert shares.take("large", 6)
    assert not shares.take("small", 1)
