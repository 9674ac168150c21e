"""Few combinations have every pair of choices."""

from __future__ import annotations

import itertools

from tests.building.pairs import covering, pairs_of

CHOICES = ["abc", "xyz", "12", "p"]


def test_each_pair_of_two_arguments_choices_is_in_one_of_few_combinations() -> None:
    combinations = list(itertools.product(*CHOICES))
    few = list(covering(combinations))
    pairs = {pair for combination in few for pair in pairs_of(combination)}
    assert pairs == {pair for combination in combinations for pair in pairs_of(combination)}
    assert len(few) == 9
    assert few == list(covering(combinations))
