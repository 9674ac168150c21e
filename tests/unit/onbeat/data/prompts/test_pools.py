"""What an iteration takes of its sources: shares that add up, and passes of their own."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from onbeat.data.prompts.pools import Pool, Walk, quotas


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
