"""Hosts that form a trainer, explored to the last state: the protocol is right, and it needs its checks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import groups
from tests.model.groups import MUTATIONS, PAIR, TRIO, Bounds, Mutation, explored

SLOW = {"form.again", "seal.again"}
"""Need every state of a larger instance: `make model` has them."""


@pytest.mark.parametrize("bounds", [PAIR, TRIO])
def test_no_reachable_state_of_three_hosts_breaks_an_invariant_or_is_stuck(bounds: Bounds) -> None:
    result = explored(bounds)
    assert (result.breaks, result.trace, result.is_complete) == ("", (), True)
    assert result.num_states > 100


@pytest.mark.parametrize("mutation", [one for one in MUTATIONS if one.off not in SLOW], ids=lambda one: one.off)
def test_without_this_check_a_group_breaks(mutation: Mutation) -> None:
    result = explored(mutation.bounds, mutation.off)
    assert result.breaks.startswith(mutation.breaks)
    assert result.trace


def test_every_check_of_the_groups_is_left_out_once() -> None:
    named = set(
        re.findall(r'"([a-z]+\.[a-z]+)" (?:not )?in off|CLOCK = "([a-z.]+)"', Path(groups.__file__).read_text())
    )
    assert {one or other for one, other in named} == {one.off for one in MUTATIONS}
