"""A curriculum by a column: the lowest rows first, a share that grows linearly; then all in shuffled passes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from contracts.spec.datasets import CurriculumSpec, RowsTable, sources_of
from contracts.spec.job import JobSpec
from onbeat.data.prompts.pools import Pool, seeded


@dataclass(eq=False, kw_only=True)
class ColumnPool(Pool):
    """The prompts of a source, the easiest first."""

    curriculum: CurriculumSpec

    @classmethod
    def of(cls, spec: JobSpec, pool: Pool, difficulty: Sequence[float]) -> Self:
        """Makes the pool of a source whose table has a curriculum.

        Args:
            spec: The job's spec.
            pool: The source's prompts.
            difficulty: [len(pool.places)], in the order of the places; the lowest is the easiest.
        """
        table = sources_of(spec.dataset)[pool.name]
        assert isinstance(table, RowsTable)
        assert table.curriculum
        # Equals keep the order of their rows.
        easiest_first = sorted(range(len(pool.places)), key=lambda number: difficulty[number])
        places = [pool.places[number] for number in easiest_first]
        return cls(places=places, name=pool.name, weight=pool.weight, curriculum=table.curriculum)

    def take(self, iteration: int, quota: int, *, seed: str, before: Callable[[int], int]) -> Sequence[int]:
        if iteration >= self.curriculum.iterations:
            return self.passed(before(iteration) - before(self.curriculum.iterations), quota, seed)
        places = list(self.open_at(iteration, least=quota))
        seeded(f"{seed}/curriculum/{iteration}").shuffle(places)
        return list(itertools.islice(itertools.cycle(places), quota))

    def open_at(self, iteration: int, *, least: int) -> Sequence[int]:
        if iteration >= self.curriculum.iterations:
            return self.places
        begins = self.curriculum.begins_with
        share = begins + (1.0 - begins) * iteration / self.curriculum.iterations
        return self.places[: max(least, round(share * len(self.places)))]
