"""The seam between the trainer's loop and its ranks is small, and each kind of ranks keeps to it."""

from __future__ import annotations

import inspect

import pytest

from consumer.ranks.base import Ranks
from consumer.ranks.threads import ThreadedRank

MEMBERS = {
    "begin",
    "close",
    "dry_pass",
    "most_handed_out",
    "probe",
    "publish",
    "rest",
    "save",
    "step",
    "train",
    "train_again",
}
"""Beside them is the learner, the policy and spec of rank 0."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [Ranks, ThreadedRank])
def test_ranks_have_eleven_members_and_their_kinds_have_no_other(kind: type[Ranks]) -> None:
    assert public(kind) == MEMBERS
    assert len(MEMBERS) == 11
    for name in MEMBERS - {"most_handed_out"}:
        assert inspect.signature(getattr(kind, name)) == inspect.signature(getattr(Ranks, name))
