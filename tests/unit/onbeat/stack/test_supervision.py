"""A dead process is started again after a growing pause, up to a cap."""

from __future__ import annotations

from typing import cast

import pytest

from contracts.errors import Unavailable
from contracts.jobs import WorkerExit, is_of_work
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.supervision import GOOD_LIFE_S, PATIENT, Supervised
from tests.until import Clock


class Child:
    name = "generator-1"

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.num_starts = 0

    def start(self) -> None:
        self.exit_code = None
        self.num_starts += 1

    def tail(self) -> str:
        return "last words"


def die_and_return(supervised: Supervised, child: Child, clock: Clock, exit_code: int = 3) -> float:
    """Seconds from a death to the next start."""
    child.exit_code = exit_code
    died_s = clock.now_s
    supervised.tick()
    while child.exit_code is not None:
        clock.now_s += 0.5
        supervised.tick()
    return clock.now_s - died_s


def test_a_living_process_is_left_alone() -> None:
    child = Child()
    Supervised(cast(ChildProcess, child), clock=Clock()).tick()
    assert child.num_starts == 0


def test_pauses_double_and_a_process_that_keeps_dying_is_an_error_with_its_last_words() -> None:
    child, clock = Child(), Clock()
    supervised = Supervised(cast(ChildProcess, child), clock=clock)
    deaths_s = [die_and_return(supervised, child, clock) for _ in range(PATIENT.max_in_a_row)]
    child.exit_code = 3
    with pytest.raises(Unavailable, match=r"(?s)generator-1: ended with exit code 3 7 times in a row.*last words"):
        supervised.tick()
    assert deaths_s == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    assert child.num_starts == PATIENT.max_in_a_row


@pytest.mark.parametrize("exit_code", [-9, WorkerExit.DIED_AT_WORK])
def test_a_generator_that_dies_of_its_work_is_started_again_for_ever_and_with_pauses(exit_code: int) -> None:
    child, clock = Child(), Clock()
    supervised = Supervised(cast(ChildProcess, child), clock=clock, is_excused=is_of_work)
    deaths_s = [die_and_return(supervised, child, clock, exit_code) for _ in range(3 * PATIENT.max_in_a_row)]
    assert deaths_s[:3] == [0.5, 1.0, 2.0]
    assert max(deaths_s) == deaths_s[-1] == PATIENT.longest_pause_s
    for _ in range(PATIENT.max_in_a_row):
        die_and_return(supervised, child, clock, 1)
    child.exit_code = 1
    with pytest.raises(Unavailable, match="exit code 1 7 times in a row"):
        supervised.tick()


def test_a_long_life_clears_the_slate() -> None:
    child, clock = Child(), Clock()
    supervised = Supervised(cast(ChildProcess, child), clock=clock)
    for _ in range(3 * PATIENT.max_in_a_row):
        clock.now_s += GOOD_LIFE_S
        child.exit_code = 1
        supervised.tick()
        clock.now_s += PATIENT.first_pause_s
        supervised.tick()
    assert child.num_starts == 3 * PATIENT.max_in_a_row
