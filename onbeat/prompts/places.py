"""Which places of the training set an iteration takes: a pure function of the spec and the iteration (I7).

A data set is a pool, or several are that a mixture names. A pool is walked through in passes, each in an order of its
own, or drawn from by a curriculum.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from contracts.spec_tables.datasets import CurriculumSpec

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less their whole parts, fill [0, 1) the most evenly."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The training prompts of one source."""

    places: Sequence[int]
    """Places in the training set; with a curriculum in its order."""
    name: str = ""
    """"" of the only one."""
    weight: float = 1.0
    curriculum: CurriculumSpec | None = None

    def open_at(self, iteration: int, *, least: int) -> Sequence[int]:
        """The places that an iteration may take, at least so many where there are."""
        if not self.grows_at(iteration):
            return self.places
        assert self.curriculum is not None
        begins, size = self.curriculum.begins_with, len(self.places)
        share = begins + (1.0 - begins) * iteration / self.curriculum.iterations
        return self.places[: max(least, round(share * size))]

    def grows_at(self, iteration: int) -> bool:
        """Whether the curriculum keeps something out of the iteration."""
        return self.curriculum is not None and iteration < self.curriculum.iterations


class Walk:
    """The way of one job through its pools."""

    def __init__(self, pools: Sequence[Pool], *, num_prompts: int, seed: int) -> None:
        """num_prompts: of an iteration."""
        self._pools, self._num_prompts, self._seed = pools, num_prompts, seed
        self._taken = [[0] * len(pools)]
        """[iteration][pool]: prompts of the iterations before."""
        self._pass_order = functools.lru_cache(maxsize=2 * len(pools))(pass_order)

    def places(self, iteration: int) -> list[int]:
        """The places of an iteration's prompts."""
        return [place for place, _ in self._chosen(iteration)]

    def reserves(self, iteration: int, *, num_rounds: int) -> list[int]:
        """[num_rounds * num_prompts] what takes their places, of the same source each; none of `places` is among it."""
        if num_rounds == 0:
            return []
        chosen = self._chosen(iteration)
        taken = {place for place, _ in chosen}
        fresh = [
            iter(
                reserve_places(
                    pool.open_at(iteration, least=quota + 1),
                    taken=taken.intersection(pool.places),
                    num_reserves=num_rounds * quota,
                    seed=self._key(pool),
                    iteration=iteration,
                )
            )
            for pool, quota in zip(self._pools, self._quotas(iteration), strict=True)
        ]
        return [next(fresh[pool]) for _ in range(num_rounds) for _, pool in chosen]

    def _chosen(self, iteration: int) -> list[tuple[int, int]]:
        """(place, pool) of each prompt."""
        quotas = self._quotas(iteration)
        chosen = [(place, pool) for pool, quota in enumerate(quotas) for place in self._of_pool(pool, quota, iteration)]
        if len(self._pools) > 1:
            # Each batch has something of each source.
            seeded(f"{self._seed}/mixture/{iteration}").shuffle(chosen)
        return chosen

    def _of_pool(self, index: int, quota: int, iteration: int) -> list[int]:
        pool = self._pools[index]
        if pool.grows_at(iteration):
            places = list(pool.open_at(iteration, least=quota))
            seeded(f"{self._key(pool)}/curriculum/{iteration}").shuffle(places)
            return list(itertools.islice(itertools.cycle(places), quota))
        begins = min(iteration, pool.curriculum.iterations) if pool.curriculum else 0
        first = self._before(iteration)[index] - self._before(begins)[index]
        size = len(pool.places)
        # Iterations walk through an endless sequence of passes, each in an order of its own.
        return [
            pool.places[self._pass_order(size, self._key(pool), position // size)[position % size]]
            for position in range(first, first + quota)
        ]

    def _before(self, iteration: int) -> list[int]:
        while len(self._taken) <= iteration:
            quotas = self._quotas(len(self._taken) - 1)
            self._taken.append([sum(pair) for pair in zip(self._taken[-1], quotas, strict=True)])
        return self._taken[iteration]

    def _quotas(self, iteration: int) -> list[int]:
        return quotas([pool.weight for pool in self._pools], self._num_prompts, iteration)

    def _key(self, pool: Pool) -> str:
        return f"{self._seed}/{pool.name}" if pool.name else str(self._seed)


def quotas(weights: Sequence[float], size: int, iteration: int) -> list[int]:
    """Cuts `size` prompts by weight: each part is its share, rounded up or down, and its share in the mean over
    iterations.

    The sums of the shares are shifted by one number in [0, 1), and rounded down; parts lie between them. Two prompts by
    weights of 3 and 1 are [2, 0] in iteration 0, then [1, 1], [2, 0], [1, 1].
    """
    shift = (iteration + 1) * GOLDEN % 1.0
    total = math.fsum(weights)
    ends = [math.floor(size * part / total + shift) for part in itertools.accumulate(weights)]
    return [end - start for start, end in itertools.pairwise([0, *ends[:-1], size])]


def seeded(name: str) -> random.Random:
    """Draws of their own for each name."""
    return random.Random(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big"))


def pass_order(num_examples: int, seed: int | str, pass_number: int) -> Sequence[int]:
    """Permutes a pool for one pass, from (seed, pass) alone."""
    order = list(range(num_examples))
    seeded(f"{seed}/{pass_number}").shuffle(order)
    return order


def reserve_places(
    pool: Sequence[int], *, taken: Collection[int], num_reserves: int, seed: int | str, iteration: int
) -> list[int]:
    """Draws places for an iteration's reserves, from (seed, iteration) and what it took.

    They are drawn without replacement, and again in another order once all have been; at least one place is not taken.
    """
    draw = seeded(f"{seed}/reserve/{iteration}")
    drawn = draw.sample(pool, min(len(pool), len(taken) + num_reserves))
    fresh = [place for place in drawn if place not in taken]
    places: list[int] = []
    while len(places) < num_reserves:
        places += fresh
        draw.shuffle(fresh)
    return places[:num_reserves]
