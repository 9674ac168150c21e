"""A batch as it is trained: what stages made of it stands beside what was sampled, and their rewards join its own."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from consumer.gradient.advantages.estimators import compared_rewards
from contracts.encoding.arrays import pack_float32
from contracts.errors import ContractViolation
from contracts.experience.columns import values_digest
from contracts.rollouts import batch_digest
from contracts.spec.job import JobSpec
from onbeat.loop.gathering import staged_batch
from tests.builders import batch_of, job_spec, rollout

BATCH = batch_of([([5], [rollout([7], 0.25), rollout([8, 9], 1.0)]), ([6], [rollout([7], 0.0), rollout([7], 0.5)])])


def scores(*values: float) -> list[bytes]:
    return [pack_float32([value]) for value in values]


def external(name: str, *, weight: float | None = None) -> dict[str, Any]:
    of_reward = {} if weight is None else {"reward_column": name, "weight": weight}
    outputs = [{"name": name, "type": "float32"}]
    return {"type": "external", "name": name, "inputs": ["text"], "outputs": outputs, **of_reward}


def staged_spec() -> JobSpec:
    return job_spec(stages=[external("brief", weight=-0.5), external("noted"), external("kind", weight=2.0)])


def test_reward_columns_join_the_rewards_and_the_breakdown_by_their_weights() -> None:
    values = {
        "brief": scores(1.0, 0.0, 0.5, 0.0),
        "noted": scores(9.0, 9.0, 9.0, 9.0),
        "kind": scores(0.0, 0.25, 0.0, 1.0),
    }
    batch, digest = staged_batch(BATCH, values, staged_spec())
    rollouts = [one for group in batch.groups for one in group.rollouts]
    assert [one.reward for one in rollouts] == [-0.25, 1.5, -0.25, 2.5]
    assert rollouts[1].reward_breakdown == {"exact": 1.0, "brief": 0.0, "kind": 0.25}
    assert batch.columns == {name: tuple(of_rows) for name, of_rows in values.items()}
    assert digest == values_digest(values)
    # What was sampled and scored keeps its own digest: that of the ledger and of the audit chain.
    assert batch_digest(BATCH) != batch_digest(batch)


def test_columns_without_a_weight_leave_the_rewards_alone() -> None:
    batch, _ = staged_batch(BATCH, {"noted": scores(1.0, 2.0, 3.0, 4.0)}, job_spec(stages=[external("noted")]))
    assert batch.groups == BATCH.groups


MODEL = {"type": "reward_model", "model": "m", "weight": 2.0, "on_failure": -0.5}


def test_what_a_stage_could_not_judge_has_the_stated_score_and_is_marked_with_the_reason() -> None:
    values = {"reward_model": scores(1.0, -0.5, -0.5, 0.0), "reward_model_failure": [b"", b"too_long", b"", b""]}
    batch, digest = staged_batch(BATCH, values, job_spec(stages=[MODEL]))
    rollouts = [one for group in batch.groups for one in group.rollouts]
    assert [one.reward for one in rollouts] == [2.25, 0.0, -1.0, 0.5]
    assert [one.unscorable for one in rollouts] == [{}, {"reward_model": "too_long"}, {}, {}]
    assert digest == values_digest(values), "the chain has which of them it was"


RUBRIC = {"type": "llm_judge", "model": "m", "prompt": "{completion}", "answer": "json", "weight": 2.0}
OF_CRITERIA = {
    "llm_judge_right": scores(1.0, 0.5, 0.75, 0.75),
    "llm_judge_short": scores(0.0, 0.5, 0.5, 1.0),
    "llm_judge_failure": [b"", b"refused", b"", b""],
}


def rubric_spec(**changes: Any) -> JobSpec:
    stage = RUBRIC | {"criteria": {"right": 3.0, "short": 1.0}, "on_failure": 0.5}
    return job_spec(stages=[stage], deterministic=False, **changes)


def test_each_criterion_is_a_component_of_the_reward_and_a_stated_score_is_that_of_all() -> None:
    batch, _ = staged_batch(BATCH, OF_CRITERIA, rubric_spec())
    rollouts = [one for group in batch.groups for one in group.rollouts]
    assert [one.reward for one in rollouts] == [0.25 + 1.5, 1.0 + 1.0, 0.0 + 1.375, 0.5 + 1.625]
    assert rollouts[2].reward_breakdown == {"exact": 0.0, "llm_judge_right": 0.75, "llm_judge_short": 0.5}
    assert [one.unscorable for one in rollouts] == [{}, {"llm_judge": "refused"}, {}, {}]
    for name in ("llm_judge_right", "llm_judge_short"):
        changed = OF_CRITERIA | {name: scores(0.0, 1.0, 0.0, 0.0)}
        with pytest.raises(ContractViolation, match="row 1: is no reason with the score that the spec states"):
            staged_batch(BATCH, changed, rubric_spec())


def test_under_gdpo_each_criterion_is_normalised_by_itself() -> None:
    """As arXiv 2601.05242 has it, over exact, right and short; in the second group `right` says nothing."""
    spec = rubric_spec(algorithm__advantage="gdpo")
    batch, _ = staged_batch(BATCH, OF_CRITERIA, spec)
    components = [(1.0, [0.25, 1.0, 0.0, 0.5]), (1.5, [1.0, 0.5, 0.75, 0.75]), (0.5, [0.0, 0.5, 0.5, 1.0])]
    expected = [
        sum(
            weight * (values[row] - statistics.fmean(of_group)) / (statistics.stdev(of_group) + 1e-4)
            for weight, values in components
            for of_group in [values[row // 2 * 2 : row // 2 * 2 + 2]]
        )
        for row in range(4)
    ]
    earned = np.array([[one.reward for one in group.rollouts] for group in batch.groups])
    assert compared_rewards(batch, earned, spec).ravel().tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("score", "reason"), [(0.5, b"too_long"), (-0.5, b"because"), (-0.5, b"timeout"), (-0.5, b"x" * 2**16)]
)
def test_a_reason_that_no_stage_has_or_one_with_another_score_is_refused(score: float, reason: bytes) -> None:
    values = {"reward_model": scores(1.0, score, 1.0, 0.0), "reward_model_failure": [b"", reason, b"", b""]}
    with pytest.raises(ContractViolation, match="row 1: is no reason with the score that the spec states"):
        staged_batch(BATCH, values, job_spec(stages=[MODEL]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "column noted is missing"),
        ({"noted": scores(1.0, 2.0, float("nan"), 4.0)}, "column noted, row 2: a number is not finite"),
    ],
)
def test_columns_that_are_not_the_jobs_are_refused_before_they_are_trained(
    values: dict[str, list[bytes]], words: str
) -> None:
    with pytest.raises(ContractViolation) as refused:
        staged_batch(BATCH, values, job_spec(stages=[external("noted")]))
    assert words in str(refused.value)
    assert str(refused.value).startswith("batch 0/train/0: ")
