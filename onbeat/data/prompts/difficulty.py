"""A curriculum by measured pass rates: a pure function of the spec, the iteration and the commits before it (I7).

    commit of i - 1 - K ─ how many of each group passed ─▶ pass rates ─▶ easy, normal, hard ─▶ the draw of iteration i
                          (AuditRecord.drawn)                                                 (opened by that commit)

K is the job's lag. What a draw needs is committed when its iteration is opened, and stands in the audit chain: a
trainer that goes on, on whichever host, draws the same, and `onbeat verify` draws again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from contracts.errors import FenceViolation, InvalidInput
from contracts.events import AuditRecord
from contracts.jobs import DrawnPrompts
from contracts.spec.datasets import DifficultyPools, MixtureDataset, difficulty_pools_of, sources_of
from contracts.spec.job import JobSpec
from onbeat.data.prompts.pools import Pool, Walk, quotas, seeded

ABANDONED = -1


@dataclass(frozen=True, kw_only=True)
class _Draw:
    places: Sequence[int]
    """Places in the training set."""
    num_easy: int
    num_hard: int
    """Prompts in either pool when it was drawn."""


@dataclass(eq=False, kw_only=True)
class MeasuredPool(Pool):
    """The prompts of a source, each with the pass rate that commits have measured."""

    pools: DifficultyPools
    group_size: int
    num_open: int
    """Iterations that are open at the same time: K + 1."""

    def __post_init__(self) -> None:
        self._measured: dict[int, DrawnPrompts] = {}
        """Committed iteration → what it drew, and how that went."""
        self._rates: dict[int, float] = {}
        """Number of a prompt in the source → its pass rate; only of those that were ever measured."""
        self._num_folded = 0
        """The rates are of the iterations before this one."""
        self._draws: dict[int, _Draw] = {}
        """The draws of the last iterations."""

    @classmethod
    def of(cls, spec: JobSpec, pool: Pool) -> Self:
        """Makes the pool of a source whose table has difficulty pools."""
        return cls(
            places=pool.places,
            name=pool.name,
            weight=pool.weight,
            pools=difficulty_pools_of(spec.dataset)[pool.name],
            group_size=spec.rollout.group_size,
            num_open=spec.num_open,
        )

    def learn(self, iteration: int, drawn: DrawnPrompts) -> None:
        """Raises InvalidInput where the source had another number of prompts."""
        if drawn.num_prompts != len(self.places):
            raise InvalidInput(
                f"the data set {self.name and f'`{self.name}` '}has {len(self.places)} training prompts, it had "
                f"{drawn.num_prompts} in iteration {iteration}, and its pass rates are of those",
                field="dataset",
                cure="put the data set back that the job was started with",
            )
        if iteration in self._measured:
            # It was trained again: nothing that followed from it stands.
            self._rates = {}
            self._num_folded = 0
            self._draws = {}
        self._measured[iteration] = drawn

    def take(self, iteration: int, quota: int, *, seed: str, before: Callable[[int], int]) -> Sequence[int]:
        if iteration not in self._draws:
            first_open = iteration - self.num_open + 1
            open_draws = {number: draw for number, draw in self._draws.items() if number >= first_open}
            self._draws = {**open_draws, iteration: self._draw(iteration, quota, seed)}
        return self._draws[iteration].places

    def drawn(self, iteration: int, groups: Sequence[tuple[int, Sequence[float] | None]]) -> DrawnPrompts:
        draw = self._draws[iteration]
        passing = self.pools.pass_reward
        return DrawnPrompts(
            source=self.name,
            num_prompts=len(self.places),
            num_easy=draw.num_easy,
            num_hard=draw.num_hard,
            places=tuple(self._number_of[place] for place, _ in groups),
            passed=tuple(
                ABANDONED if rewards is None else sum(reward >= passing for reward in rewards) for _, rewards in groups
            ),
        )

    def _draw(self, iteration: int, quota: int, seed: str) -> _Draw:
        """Draws from each pool without replacement; a source that is smaller than the quota comes several times.

        Each call of `draw` advances its state, so that the order of the calls below, and of the numbers that each gets,
        is part of the result: another order gives other prompts, and with them other digests of the job (I7).
        """
        easy, normal, hard = self._pools_at(iteration)
        draw = seeded(f"{seed}/difficulty/{iteration}")
        taken = set[int]()

        def take_from(pool: Sequence[int], most: int) -> None:
            left = [number for number in pool if number not in taken]
            taken.update(draw.sample(left, min(most, len(left))))

        of_easy = self.pools.easy_fraction
        of_hard = self.pools.hard_fraction
        shares = quotas([of_easy, max(0.0, 1.0 - of_easy - of_hard), of_hard], quota, iteration)
        # First the share of each pool: easy, normal, hard. Pools that have fewer prompts than their share are filled up
        # from the others: normal ones first, then hard, then easy ones.
        for pool, share in zip((easy, normal, hard), shares, strict=True):
            take_from(pool, share)
        for pool in (normal, hard, easy):
            take_from(pool, quota - len(taken))
        # Sorted before the shuffle: a set has an order of its own, which is none that a digest could depend on.
        chosen = sorted(taken)
        draw.shuffle(chosen)
        places = [self.places[number] for number in itertools.islice(itertools.cycle(chosen), quota)]
        return _Draw(places=places, num_easy=len(easy), num_hard=len(hard))

    def _pools_at(self, iteration: int) -> tuple[list[int], list[int], list[int]]:
        """The numbers of the easy, normal and hard prompts, ascending, after the commit that opens the iteration."""
        rates = self._rates_after(max(0, iteration - self.num_open + 1))
        easy = sorted(number for number, rate in rates.items() if rate >= self.pools.easy_threshold)
        hard = sorted(number for number, rate in rates.items() if rate <= self.pools.hard_threshold)
        others = {*easy, *hard}
        return easy, [number for number in range(len(self.places)) if number not in others], hard

    def _rates_after(self, num_commits: int) -> dict[int, float]:
        """Returns the pass rates after so many commits. Raises FenceViolation where one is missing."""
        if num_commits < self._num_folded:
            self._rates = {}
            self._num_folded = 0
        for iteration in range(self._num_folded, num_commits):
            if iteration not in self._measured:
                raise FenceViolation(f"iteration {iteration} is not committed, and the draw follows from it")
            self._fold(self._measured[iteration])
        self._num_folded = num_commits
        return self._rates

    def _fold(self, drawn: DrawnPrompts) -> None:
        """Moves the rate of each prompt towards the share of its newest group that passed, which is its first rate."""
        for number, passed in zip(drawn.places, drawn.passed, strict=True):
            if passed != ABANDONED:
                share = passed / self.group_size
                rate = self._rates.get(number, share)
                self._rates[number] = rate + self.pools.newest_weight * (share - rate)

    @functools.cached_property
    def _number_of(self) -> dict[int, int]:
        """Place in the training set → number in the source."""
        return {place: number for number, place in enumerate(self.places)}


class DrawCheck:
    """Draws each iteration again from what the records before have measured."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._walk: Walk | None = None

    def __call__(self, record: AuditRecord) -> Iterator[str]:
        """Says what is wrong with a commit, which has the draws of each source with difficulty pools."""
        drawn = record.drawn or ()
        if self._walk is None:
            self._walk = self._begin({draw.source: draw.num_prompts for draw in drawn})
        if not 0 <= record.iteration < self._spec.iterations:
            yield "its prompts can't be drawn again"
            return
        try:
            redrawn = self._walk.drawn(record.iteration, self._no_rewards(record))
            for committed, again in zip(drawn, redrawn, strict=True):
                yield from self._problems(committed, again)
            self._walk.learn(record.iteration, drawn)
        except (FenceViolation, InvalidInput) as error:
            yield f"its prompts can't be drawn again: {error.problem}"

    def _problems(self, committed: DrawnPrompts, again: DrawnPrompts) -> Iterator[str]:
        """Yields what a committed draw has wrong. again: the draw as it must be, without rewards."""
        name = f"the draw{committed.source and f' of `{committed.source}`'}"
        if (committed.places, committed.num_easy, committed.num_hard) != (again.places, again.num_easy, again.num_hard):
            yield f"{name} is not what the pass rates before it give"
        are_prompts = all(0 <= number < committed.num_prompts for number in committed.places)
        if len(committed.places) != len(committed.passed) or not are_prompts:
            raise FenceViolation(f"{name} is of no group, or of no prompt")
        trained = [passed != ABANDONED for passed in again.passed]
        most = self._spec.rollout.group_size
        committed_trained = [passed != ABANDONED for passed in committed.passed]
        numbers_passed = {ABANDONED, *range(most + 1)}
        if committed_trained != trained or not set(committed.passed) <= numbers_passed:
            yield f"{name} has pass rates of other groups than those that were trained"

    def _begin(self, sizes: dict[str, int]) -> Walk:
        """Returns the job's walk by numbers in the source; sources without difficulty pools have one prompt in it."""
        dataset = self._spec.dataset
        pools: list[Pool] = []
        weights: dict[str, float] = {}
        if isinstance(dataset, MixtureDataset):
            weights = {source.name: source.weight for source in dataset.sources}
        for name in sources_of(dataset):
            pool = Pool(places=range(max(1, sizes.get(name, 1))), name=name, weight=weights.get(name, 1.0))
            pools.append(MeasuredPool.of(self._spec, pool) if name in sizes else pool)
        return Walk(pools, num_prompts=self._spec.rollout.prompts_per_iteration, seed=self._spec.seed)

    def _no_rewards(self, record: AuditRecord) -> dict[int, Sequence[float]]:
        """Index of each prompt whose batch was trained → no rewards."""
        rollout = self._spec.rollout
        iteration = record.iteration
        size = rollout.prompts_per_batch
        return {
            index: ()
            for index in range(rollout.prompts_per_iteration)
            if f"{iteration}/train/{index // size}" in record.batches
        }
