"""A batch as it is trained: what stages made of it stands beside what was sampled, and their rewards join its own."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.arrays import pack_float32
from contracts.errors import ContractViolation
from contracts.experience.columns import values_digest
from contracts.rollouts import batch_digest
from contracts.spec import JobSpec
from onbeat.loop.staged import staged_batch
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
        ({"noted": scores(1.0)}, "column noted has 1 values for 4 rows"),
        ({"noted": scores(1.0, 2.0, float("nan"), 4.0)}, "column noted, row 2: a number is not finite"),
        ({"noted": scores(1.0, 2.0, 3.0, float("-inf"))}, "column noted, row 3: a number is not finite"),
        ({"noted": [b"", b"", b"", b""]}, "column noted, row 0: 0 bytes are not 1 x float32"),
        ({"noted": scores(1, 2, 3, 4), "other": scores(1, 2, 3, 4)}, "column other is no output of this stage"),
    ],
)
def test_columns_that_are_not_the_jobs_are_refused_before_they_are_trained(
    values: dict[str, list[bytes]], words: str
) -> None:
    with pytest.raises(ContractViolation) as refused:
        staged_batch(BATCH, values, job_spec(stages=[external("noted")]))
    assert words in str(refused.value)
    assert str(refused.value).startswith("batch 0/train/0: ")
