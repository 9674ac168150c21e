"""Threads that share cores slow each other down, as a machine's kernel shares them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import pytest
from simpy import Environment, Event, Interrupt

from onbeat_extras.planning.pipeline.processors import Processors

Steps = Generator[Event, Any, None]


def ends_s(num_cores: int, *computations: tuple[float, float, int]) -> list[float]:
    """(start, seconds, threads) → when each ends."""
    environment = Environment()
    processors = Processors(environment, num_cores)
    ended: dict[int, float] = {}

    def compute(number: int, start_s: float, seconds: float, threads: int) -> Steps:
        yield environment.timeout(start_s)
        yield from processors.compute(seconds, threads=threads)
        ended[number] = environment.now

    for number, computation in enumerate(computations):
        environment.process(compute(number, *computation))
    environment.run()
    return [round(ended[number], 9) for number in range(len(computations))]


def test_each_process_has_a_device_of_its_own_where_no_cores_are_shared() -> None:
    assert ends_s(0, (0.0, 2.0, 1), (0.0, 3.0, 1), (0.0, 1.0, 4)) == [2.0, 3.0, 1.0]


def test_as_many_threads_as_cores_are_not_slowed() -> None:
    assert ends_s(2, (0.0, 2.0, 1), (0.5, 3.0, 1)) == [2.0, 3.5]


def test_two_threads_on_one_core_have_half_of_it_each_while_both_run() -> None:
    # At 1 s the first has 2 s left; both run at half speed until the second has had its second, at 3 s.
    assert ends_s(1, (0.0, 3.0, 1), (1.0, 1.0, 1)) == [4.0, 3.0]


def test_a_process_of_several_threads_takes_its_share_of_the_cores() -> None:
    assert ends_s(2, (0.0, 1.0, 2), (0.0, 1.0, 2)) == [2.0, 2.0]
    assert ends_s(2, (0.0, 1.0, 1), (0.0, 1.0, 2)) == [1.5, 1.5]


def test_a_computation_that_is_dropped_gives_its_core_back() -> None:
    environment = Environment()
    processors = Processors(environment, 1)

    def compute() -> Steps:
        with contextlib.suppress(Interrupt):
            yield from processors.compute(10.0)

    dropped = environment.process(compute())
    kept = environment.process(processors.compute(3.0))

    def drop() -> Steps:
        yield environment.timeout(2.0)
        dropped.interrupt()

    environment.process(drop())
    environment.run(until=kept)
    assert environment.now == pytest.approx(4.0)
