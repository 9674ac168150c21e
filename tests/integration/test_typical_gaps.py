"""The fence's judgement of a mixture of experts in 16 bits: a few rows may be far off, half of them may not."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.connection.client import connect
from broker.generator_side import GeneratorSide
from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.probes import Probe, ProbeRow, ProofVerdict, bounds_for
from contracts.settings import StackSettings
from tests.builders import manifest
from tests.integration.test_fence import opened

NUM_ROWS = 8
TRAINERS = [-1.0, -3.0] * NUM_ROWS
"""Two tokens a row; gaps are divided by one plus their size, 2 and 4."""


def verdict_of(settings: StackSettings, off: dict[int, float]) -> ProofVerdict:
    """off: row → how far the second token's log-prob is from the trainer's."""
    job = opened(connect(settings))
    rows = tuple(ProbeRow(prompt=pack_int32([5]), scored=pack_int32([6, number])) for number in range(NUM_ROWS))
    bounds = bounds_for("bfloat16", max_gap=UNSET, is_routed=True, is_exact=False)
    version = replace(manifest(1), probe=Probe(rows=rows, logprobs=pack_float32(TRAINERS), bounds=bounds))
    job.trainer.publish_weights(version, oldest_kept=0)
    values = list(TRAINERS)
    for row, difference in off.items():
        values[2 * row + 1] += difference
    return GeneratorSide(job.broker, job.job_id, "g1").prove(version, pack_float32(values), kind="vllm bfloat16")


def test_rows_up_to_half_may_be_off_as_far_as_another_expert_moves_them(settings: StackSettings) -> None:
    verdict = verdict_of(settings, dict.fromkeys(range(4), 1.9))
    assert (verdict.outcome, verdict.bound) == ("proved", 0.5)
    assert verdict.gap == pytest.approx(1.9 / 4)


def test_more_than_half_of_the_rows_may_not(settings: StackSettings) -> None:
    verdict = verdict_of(settings, {3: 1.9, 1: 0.8, 2: 0.7, 5: 0.6, 6: 0.5})
    assert (verdict.outcome, verdict.row) == ("far", 6)
    assert (verdict.gap, verdict.bound) == (pytest.approx(0.5 / 4), 0.1)


def test_no_row_may_be_off_further(settings: StackSettings) -> None:
    verdict = verdict_of(settings, {3: -2.1})
    assert (verdict.outcome, verdict.row, verdict.bound) == ("far", 3, 0.5)
