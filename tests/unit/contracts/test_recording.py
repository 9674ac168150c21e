"""Which batches a spec has recorded."""

from __future__ import annotations

import pytest

from contracts.spec.recording import NOTHING_RECORDED, RecordingSpec
from tests.builders import job_spec


def recorded(policy: RecordingSpec, iteration: int, *, num_batches: int, seed: int = 7) -> list[int]:
    """The numbers of an iteration's training batches that are recorded."""
    return [
        index
        for index in range(num_batches)
        if policy.takes(f"{iteration}/train/{index}", purpose="train", seed=seed, num_batches=num_batches)
    ]


@pytest.mark.parametrize("evaluations", [True, False])
def test_an_evaluation_is_recorded_by_its_own_setting_whatever_the_share_of_training(evaluations: bool) -> None:
    policy = RecordingSpec(share=0.0 if evaluations else 1.0, evaluations=evaluations)
    assert policy.takes("3/evaluation/0", purpose="evaluation", seed=0, num_batches=4) is evaluations
    assert recorded(policy, 3, num_batches=4) == ([] if evaluations else [0, 1, 2, 3])


@pytest.mark.parametrize("share", [0.25, 1e-9])
def test_each_iteration_has_a_recorded_batch_so_that_the_newest_can_be_looked_at(share: float) -> None:
    policy = RecordingSpec(share=share)
    chosen = [recorded(policy, iteration, num_batches=4) for iteration in range(100)]
    assert {len(batches) for batches in chosen} == {1}
    assert {batch for batches in chosen for batch in batches} == {0, 1, 2, 3}, "not always the same place"


def test_the_share_is_that_of_each_iteration_by_its_seed() -> None:
    policy = RecordingSpec(share=0.3)
    assert [len(recorded(policy, iteration, num_batches=10)) for iteration in range(20)] == [3] * 20
    of_seeds = [
        [recorded(policy, iteration, num_batches=10, seed=seed) for iteration in range(20)] for seed in (7, 7, 8)
    ]
    assert of_seeds[0] == of_seeds[1] != of_seeds[2]
    assert recorded(RecordingSpec(), 0, num_batches=3) == [0, 1, 2]


def test_a_spec_without_the_table_records_a_batch_of_each_iteration_and_every_evaluation() -> None:
    spec = job_spec(rollout__batches_per_iteration=8)
    assert sum(spec.records(f"5/train/{index}", "train") for index in range(8)) == 1
    assert spec.records("5/evaluation/0", "evaluation")
    without = job_spec(recording=None)
    assert without.recording_policy == NOTHING_RECORDED
    assert not without.records("5/evaluation/0", "evaluation")
