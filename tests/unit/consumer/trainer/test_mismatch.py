"""When trainer and generator disagree."""

from __future__ import annotations

import dataclasses
import math

import pytest

from consumer.gradient.micro_batch import batch_rewards
from consumer.gradient.statistics import MicroBatchStats, Mismatch, measure_batch
from consumer.trainer.report import in_words, mismatch_alarm
from tests.builders import rollout_batch


def stats(k3_sum: float, *, largest: float = 0.5) -> MicroBatchStats:
    batch = rollout_batch()
    gap = Mismatch(num_tokens=10, k3_sum=k3_sum, largest=largest, rho_sum=10.0, rho_square_sum=20.0)
    return dataclasses.replace(measure_batch(batch, batch_rewards(batch)), mismatch=gap)


def test_up_to_the_threshold_nobody_is_told() -> None:
    assert mismatch_alarm([stats(0.1), stats(0.1)], iteration=3, threshold=0.01) is None


def test_above_it_the_alarm_has_the_numbers() -> None:
    alarm = mismatch_alarm([stats(0.1), stats(4.1, largest=2.5)], iteration=3, threshold=0.01)
    assert alarm is not None
    assert (alarm.iteration, alarm.threshold, alarm.mismatch_max) == (3, 0.01, 2.5)
    assert (alarm.mismatch_k3, alarm.effective_sample_share) == (pytest.approx(0.21), 0.5)
    assert in_words(alarm) == (
        "in iteration 3 trainer and generator log-probs differ by a mean K3 of 0.21 a token (alarm above 0.01), "
        "at most by 2.5; effective sample share 0.50"
    )


@pytest.mark.parametrize("k3_sum", [math.inf, math.nan])
def test_a_gap_that_overflows_is_an_alarm(k3_sum: float) -> None:
    assert mismatch_alarm([stats(k3_sum)], iteration=0, threshold=1e9) is not None
