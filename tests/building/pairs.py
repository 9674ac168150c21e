"""Combinations of choices: `make test` tries each pair of them once, `make chaos` every combination."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from tests.chaos.short_job import long_variant

Combination = tuple[Any, ...]


def pairwise(*, indirect: Sequence[str] = (), **choices: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by every combination of these choices, of which a few cover each pair of choices.

    A fault that needs two choices together is found by these few; the others are long variants.

    Args:
        indirect: those of the arguments that are fixtures, which get the value as `request.param`.
        choices: argument of the test → its values, which can be hashed and have a text of their own.

    Returns:
        the mark for the test.
    """
    combinations = list(itertools.product(*choices.values()))
    return pytest.mark.parametrize(list(choices), few_of(combinations), indirect=list(indirect))


def few_of(combinations: Sequence[Combination]) -> list[ParameterSet]:
    """Returns a test's parameters: all combinations, of which those that cover no new pair are long variants.

    Args:
        combinations: those that are allowed; their values can be hashed and have a text of their own.
    """
    few = set(covering(combinations))
    return [
        pytest.param(*values, id="-".join(map(str, values)), marks=() if values in few else long_variant)
        for values in combinations
    ]


def covering(combinations: Sequence[Combination]) -> Iterator[Combination]:
    """Yields some of the combinations, until each pair that is in one of them was in one; the same ones in each run.

    Each is the one that has the most pairs that no combination before it had.
    """
    missing = {pair for combination in combinations for pair in pairs_of(combination)}
    while missing:
        best = max(combinations, key=lambda combination: len(missing.intersection(pairs_of(combination))))
        missing.difference_update(pairs_of(best))
        yield best


def pairs_of(combination: Combination) -> list[tuple[Any, Any]]:
    """Returns each pair of values, with the places of their arguments."""
    return list(itertools.combinations(enumerate(combination), 2))
