"""The places of the training set that an iteration takes: a pure function of the spec and the iteration (I7).

A data set is a pool, or several are that a mixture names. A pool is walked through in passes, each in an order of its
own, or drawn from by a curriculum: by a column, or by what committed iterations have measured.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from contracts.jobs import DrawnPrompts

GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
"""Its multiples, less their whole parts, fill [0, 1) the most evenly."""


@dataclass(eq=False, kw_only=True)
class Pool:
    """The training prompts of one source, through which it walks in passes."""

    places: Sequence[int]
    """Places in the training set."""
    name: str = ""
    """"" of the only one."""
    weight: float = 1.0

    def take(self, iteration: int, quota: int, *, seed: str, before: Callable[[int], int]) -> Sequence[int]:
        """Returns so many places. before: iteration → how many those before it take."""
        return self.passed(before(iteration), quota, seed)

    def open_at(self, iteration: int, *, least: int) -> Sequence[int]:
        """Returns the places that an iteration may take, at least so many where there are."""
        return self.places

    def passed(self, first: int, quota: int, seed: str) -> list[int]:
        """Returns `quota` places after the first `first` of an endless sequence of passes, each in its own order."""
        size = len(self.places)
        positions = (divmod(position, size) for position in range(first, first + quota))
        return [self.places[self._order(size, seed, number)[position]] for number, position in positions]

    def learn(self, iteration: int, drawn: DrawnPrompts) -> None:
        """Takes up what a committed iteration has measured; again where it was trained again."""

    def drawn(self, iteration: int, groups: Sequence[tuple[int, Sequence[float] | None]]) -> DrawnPrompts | None:
        """Says what the iteration took, and how it went; None where nothing is drawn by that. groups: (place, rewards)
        of each prompt, None of an abandoned batch."""

    @functools.cached_property
    def _order(self) -> Callable[[int, str, int], Sequence[int]]:
        return functools.lru_cache(maxsize=2)(pass_order)


class Walk:
    """The way of one job through its pools."""

    def __init__(self, pools: Sequence[Pool], *, num_prompts: int, seed: int) -> None:
        """num_prompts: of an iteration."""
        self._pools = pools
        self._num_prompts = num_prompts
        self._seed = seed
        self._taken = [[0] * len(pools)]
        """[iteration][pool]: prompts of the iterations before."""

    def places(self, iteration: int) -> list[int]:
        """Returns the places of an iteration's prompts."""
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

    def learn(self, iteration: int, drawn: Iterable[DrawnPrompts]) -> None:
        """Takes up what a committed iteration has measured, before anything is drawn by it."""
        pools = {pool.name: pool for pool in self._pools}
        for of_source in drawn:
            pools[of_source.source].learn(iteration, of_source)

    def drawn(self, iteration: int, rewards: Mapping[int, Sequence[float]]) -> tuple[DrawnPrompts, ...]:
        """Returns the draws by measured pass rates. rewards: a prompt's index → its group's, where it has any."""
        groups: list[list[tuple[int, Sequence[float] | None]]] = [[] for _ in self._pools]
        for index, (place, number) in enumerate(self._chosen(iteration)):
            groups[number].append((place, rewards.get(index)))
        of_pools = (pool.drawn(iteration, of_pool) for pool, of_pool in zip(self._pools, groups, strict=True))
        return tuple(draws for draws in of_pools if draws)

    def _chosen(self, iteration: int) -> list[tuple[int, int]]:
        """(place, pool) of each prompt."""
        chosen: list[tuple[int, int]] = []
        for number, (pool, quota) in enumerate(zip(self._pools, self._quotas(iteration), strict=True)):
            before = partial(self._before, number)
            chosen += ((place, number) for place in pool.take(iteration, quota, seed=self._key(pool), before=before))
        if len(self._pools) > 1:
            # Each batch has something of each source.
            seeded(f"{self._seed}/mixture/{iteration}").shuffle(chosen)
        return chosen

    def _before(self, number: int, iteration: int) -> int:
        while len(self._taken) <= iteration:
            quotas = self._quotas(len(self._taken) - 1)
            self._taken.append([sum(pair) for pair in zip(self._taken[-1], quotas, strict=True)])
        return self._taken[iteration][number]

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
    # The last sum of shares is all of `size`, and the shift is below 1: floor(size + shift) is `size`. It is written as
    # such, since a sum of floats may end a little above or below the total.
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
