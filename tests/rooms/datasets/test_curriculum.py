"""A curriculum by a column: the easiest first, then passes of all."""

from __future__ import annotations

from collections import Counter

from contracts.spec.datasets import CurriculumSpec
from onbeat.data.prompts.curriculum import ColumnPool
from onbeat.data.prompts.pools import Walk


def walk(pool: ColumnPool, *, num_prompts: int) -> Walk:
    return Walk([pool], num_prompts=num_prompts, seed=0)


def test_a_curriculum_draws_from_the_easiest_then_goes_through_passes_of_all() -> None:
    """Ten places of four iterations: 2, 4, 6 and 8 are open."""
    growing = CurriculumSpec(column="steps", iterations=4, begins_with=0.2)
    easy_first = walk(ColumnPool(places=range(10), curriculum=growing), num_prompts=2)
    walked = [easy_first.places(iteration) for iteration in range(9)]
    assert set(walked[0]) == {0, 1}
    assert [max(places) < 2 * (iteration + 1) for iteration, places in enumerate(walked[:4])] == [True] * 4
    assert sorted(place for places in walked[4:9] for place in places) == list(range(10))
    reserved = [easy_first.reserves(iteration, num_rounds=1) for iteration in range(2)]
    assert set(reserved[0]) == {2}  # the first that the iteration has not taken
    assert set(reserved[1]) | set(walked[1]) <= {0, 1, 2, 3}
    again = walk(ColumnPool(places=range(10), curriculum=growing), num_prompts=2)
    assert [again.places(iteration) for iteration in (8, 3, 0)] == [walked[8], walked[3], walked[0]]


def test_an_iteration_that_is_larger_than_what_is_open_takes_all_of_it_several_times() -> None:
    growing = CurriculumSpec(column="steps", iterations=4, begins_with=0.2)
    taken = Counter(walk(ColumnPool(places=range(3), curriculum=growing), num_prompts=7).places(0))
    assert sorted(taken.values()) == [2, 2, 3]
