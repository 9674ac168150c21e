"""What an iteration takes of its sources: shares that add up, passes of their own, the easiest first."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from contracts.spec_tables.datasets import CurriculumSpec
from onbeat.prompts.places import Pool, Walk, quotas


def walk(*pools: Pool, num_prompts: int = 4, seed: int = 0) -> Walk:
    return Walk(pools, num_prompts=num_prompts, seed=seed)


MIXED = (Pool(places=range(10), name="a", weight=3.0), Pool(places=range(10, 17), name="b"))


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [0.01, 0.3, 0.69], [1.0] * 7])
def test_each_part_is_its_share_rounded_up_or_down_and_its_share_over_many_iterations(weights: list[float]) -> None:
    sums = [0] * len(weights)
    shares = [4 * weight / math.fsum(weights) for weight in weights]
    for iteration in range(1000):
        parts = quotas(weights, 4, iteration)
        assert sum(parts) == 4
        assert all(math.floor(share) <= part <= math.ceil(share) for part, share in zip(parts, shares, strict=True))
        sums = [total + part for total, part in zip(sums, parts, strict=True)]
    assert sums == pytest.approx([1000 * share for share in shares], abs=3)


def test_a_mixture_is_a_function_of_seed_and_iteration_also_where_the_walk_begins_late() -> None:
    undisturbed = walk(*MIXED)
    walked = [undisturbed.places(iteration) for iteration in range(12)]
    assert walk(*MIXED).places(11) == walked[11]
    assert walk(*MIXED, seed=1).places(11) != walked[11]


def test_each_source_of_a_mixture_goes_through_passes_of_its_own() -> None:
    mixed = walk(*MIXED)
    taken: Counter[int] = Counter(dict.fromkeys(range(17), 0))
    for iteration in range(20):
        taken.update(mixed.places(iteration))
        for pool in MIXED:
            counts = [taken[place] for place in pool.places]
            assert max(counts) - min(counts) <= 1
    assert sum(taken[place] for place in MIXED[0].places) == 60


def test_the_sources_of_an_iteration_are_mixed_over_its_batches() -> None:
    mixed = walk(Pool(places=range(50), name="a"), Pool(places=range(50, 100), name="b"), num_prompts=16)
    first_halves = Counter(place < 50 for iteration in range(20) for place in mixed.places(iteration)[:8])
    assert 60 < first_halves[True] < 100


def test_reserves_are_of_the_source_whose_place_they_take() -> None:
    mixed = walk(*MIXED)
    for iteration in range(5):
        chosen, reserves = mixed.places(iteration), mixed.reserves(iteration, num_rounds=2)
        for place, reserve in zip([*chosen, *chosen], reserves, strict=True):
            assert (place < 10) == (reserve < 10)
        assert not set(chosen) & set(reserves)
    assert mixed.reserves(0, num_rounds=0) == []


def test_a_curriculum_draws_from_the_easiest_then_goes_through_passes_of_all() -> None:
    """Ten places of four iterations: 2, 4, 6 and 8 are open."""
    growing = CurriculumSpec(column="steps", iterations=4, begins_with=0.2)
    easy_first = walk(Pool(places=range(10), curriculum=growing), num_prompts=2)
    walked = [easy_first.places(iteration) for iteration in range(9)]
    assert set(walked[0]) == {0, 1}
    assert [max(places) < 2 * (iteration + 1) for iteration, places in enumerate(walked[:4])] == [True] * 4
    assert sorted(place for places in walked[4:9] for place in places) == list(range(10))
    reserved = [easy_first.reserves(iteration, num_rounds=1) for iteration in range(2)]
    assert set(reserved[0]) == {2}  # the first that the iteration has not taken
    assert set(reserved[1]) | set(walked[1]) <= {0, 1, 2, 3}
    again = walk(Pool(places=range(10), curriculum=growing), num_prompts=2)
    assert [again.places(iteration) for iteration in (8, 3, 0)] == [walked[8], walked[3], walked[0]]


def test_an_iteration_that_is_larger_than_what_is_open_takes_all_of_it_several_times() -> None:
    growing = CurriculumSpec(column="steps", iterations=4, begins_with=0.2)
    taken = Counter(walk(Pool(places=range(3), curriculum=growing), num_prompts=7).places(0))
    assert sorted(taken.values()) == [2, 2, 3]
