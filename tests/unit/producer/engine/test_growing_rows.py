"""Rows that have ended leave the engine's call, and take nothing along."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec import UNSET

from contracts.rollouts import Completion
from contracts.sampling import SamplingParams
from producer.engine.growing_rows import GrowingBatch, HeldRows
from producer.engine.sampling import Ends
from producer.engine.transformers.decoding import FEWEST_ROWS, staying
from tests.builders import prompt_batch

VOCAB_SIZE = 4
EOS = frozenset({0})
"""A quarter of the draws ends a row, so that rows end at every step."""


def decode(*, rows_leave: bool, top_k: int = 0) -> tuple[list[list[Completion]], list[int]]:
    """Completions of 64 rows whose logits are a function of row and step, and how many rows each step held."""
    batch = prompt_batch([[5]] * 8, group_size=8, sampling=SamplingParams(max_new_tokens=24, top_k=top_k))
    rows, growing = HeldRows(Ends(EOS)), GrowingBatch(batch=batch)
    rows.join(growing)
    held = np.arange(64)
    widths: list[int] = []
    while not growing.finished:
        widths.append(len(held))
        step = len(widths)
        logits = [np.random.default_rng((row, step)).normal(size=VOCAB_SIZE) for row in held.tolist()]
        rows.append(np.stack(logits))
        kept = staying(rows.has_ended()) if rows_leave and not growing.finished else None
        if kept is not None:
            rows.keep(kept)
            held = held[kept]
    return growing.completions, widths


@pytest.mark.parametrize("top_k", [0, 3])
def test_rows_that_leave_change_no_completion(top_k: int) -> None:
    staying, widths = decode(rows_leave=False, top_k=top_k)
    leaving, fewer = decode(rows_leave=True, top_k=top_k)
    assert leaving == staying
    assert all((one.kept_sets is not UNSET) == (top_k > 0) for group in leaving for one in group)
    assert set(widths) == {64}
    assert fewer[0] == 64
    assert fewer == sorted(fewer, reverse=True)


def test_a_few_rows_stay_and_every_departure_is_worth_it() -> None:
    _, widths = decode(rows_leave=True)
    assert FEWEST_ROWS <= min(widths) < 16
    for before, after in pairwise(widths):
        assert after == before or after <= 0.75 * before
