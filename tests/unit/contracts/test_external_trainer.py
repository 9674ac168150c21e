"""A job that a process of one's own trains: what its spec may not say beside that, and what it may."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.spec.rules import judge
from tests.builders import job_spec, judged_spec


def external(**changes: Any) -> dict[str, Any]:
    return {"trainer": {"external": True}} | changes


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"trainer": {"external": True, "world_size": 2}}, "trainer.world_size"),
        ({"trainer": {"external": True, "lora": {}}}, "trainer.lora"),
        ({"algorithm": {"loss": "grpo"}}, "algorithm.loss"),
        ({"algorithm": {"entropy_coefficient": 0.1}}, "algorithm.entropy_coefficient"),
        ({"algorithm": {"kl_coefficient": 0.1}}, "algorithm.kl_coefficient"),
        ({"optimizer": {"learning_rate": 0.5}}, "optimizer.learning_rate"),
        ({"trackers": ["wandb"]}, "trackers"),
        ({"schedule": "synchronous"}, "schedule"),
    ],
)
def test_a_key_that_an_external_trainer_ignores_is_refused_by_its_name(changes: dict[str, Any], field: str) -> None:
    assert [refusal.field for refusal in judge(job_spec(**external(**changes)))] == [field]


def test_an_external_trainer_may_have_groups_of_one_and_columns_that_no_loss_of_ours_reads() -> None:
    spec = judged_spec(**external(rollout__group_size=1, stages=[{"type": "reference"}]))
    assert spec.trainer.external
    assert spec.stage_graph.stages[0].name == "reference"
