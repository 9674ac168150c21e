"""The fence's protocol, explored to the last state: it is right, and it needs its checks (docs/fence.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.model import fence, table, trainer_moves, worker_moves
from tests.model.mutations import (
    BOUNDED,
    CROWDED,
    DELAYED,
    EVALUATING,
    IN_PIECES,
    JUDGED,
    MORTAL,
    NEEDED,
    ONE,
    PROVING,
    PROVING_ANEW,
    PROVING_BOUNDED,
    PROVING_DELAYED,
    REDUNDANT,
    REMOVABLE,
    REPLAYED,
    RESAMPLED,
    SELDOM,
    STAGED,
    TIGHT,
    TWO_BATCHES,
    TWO_KINDS,
    Mutation,
    mutated,
)
from tests.model.state import Bounds

CHECK = re.compile(r'"([a-z_]+\.[a-z_]+)"')
SLOW = {
    *(("acquire.lease", "rewind.link"), ("commit.link",), ("resume.chain",), ("columns.digest",)),
    ("trainer.weights", "commit.link", "claim_rollouts.iteration", "publish_weights.same"),
}
"""Need tens of thousands of states: `make model` has them."""
WINDOWS = (
    DELAYED,
    TIGHT,
    BOUNDED._replace(lost_writes=0),
    EVALUATING,
    BOUNDED._replace(faults=0, lag=2, iterations=4, batches=2, evaluations=1),
)
STAGES = (STAGED, JUDGED, MORTAL, CROWDED, STAGED._replace(faults=0, lag=1, iterations=2, batches=2, evaluations=1))

PROOFS = (PROVING, PROVING_ANEW, PROVING_DELAYED._replace(lost_writes=0), PROVING_BOUNDED._replace(faults=0))


@pytest.mark.parametrize(
    "bounds",
    [
        ONE,
        TWO_BATCHES,
        TWO_KINDS,
        IN_PIECES,
        RESAMPLED,
        REMOVABLE,
        REPLAYED,
        SELDOM,
        Bounds(faults=0),
        *WINDOWS,
        *STAGES,
        *PROOFS,
    ],
)
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
    named = {
        name
        for module in (fence, table, trainer_moves, worker_moves)
        for name in CHECK.findall(Path(module.__file__ or "").read_text())
    }
    listed = {name for one in (*NEEDED, *REDUNDANT) for name in one.off}
    assert named == listed
