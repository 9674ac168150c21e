"""The fence's protocol, explored to the last state: it is right, and it needs its checks (docs/model.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import fence, moves
from tests.model.mutations import (
    IN_PIECES,
    NEEDED,
    ONE,
    REDUNDANT,
    REMOVABLE,
    RESAMPLED,
    TWO_BATCHES,
    Mutation,
    mutated,
)
from tests.model.state import Bounds

CHECK = re.compile(r'"([a-z_]+\.[a-z_]+)"')
SLOW = {
    *(("acquire.lease", "rewind.link"), ("open.follows",), ("commit.link",), ("trainer.weights", "commit.link")),
    ("resume.not_after_the_fence",),
}
"""Need tens of thousands of states: `make model` has them."""


@pytest.mark.parametrize("bounds", [ONE, TWO_BATCHES, IN_PIECES, RESAMPLED, REMOVABLE, Bounds(faults=0)])
def test_no_reachable_state_breaks_an_invariant_or_is_stuck(bounds: Bounds) -> None:
    result = mutated(bounds, ())
    assert (result.breaks, result.trace, result.is_complete) == ("", (), True)
    assert result.num_states > 100


@pytest.mark.parametrize("mutation", [one for one in NEEDED if one.off not in SLOW], ids=lambda one: "+".join(one.off))
def test_without_this_check_an_invariant_breaks(mutation: Mutation) -> None:
    result = mutated(mutation.bounds, mutation.off)
    assert result.breaks.startswith(mutation.breaks)
    assert result.trace


def test_every_check_of_the_model_is_left_out_once() -> None:
    named = {name for module in (fence, moves) for name in CHECK.findall(Path(module.__file__ or "").read_text())}
    listed = {name for one in (*NEEDED, *REDUNDANT) for name in one.off}
    assert named == listed
