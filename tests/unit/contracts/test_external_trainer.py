"""A job that a process of one's own trains: what its spec may not say beside that, and what it may."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.wire import decode, encode
from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from contracts.spec.submission import check_submitted
from tests.builders import job_spec
from tests.refusals import refusal_of


def external(**changes: Any) -> Any:
    return job_spec(**{"optimizer": {}, "trainer": {"external": True}, "algorithm": {}, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"trainer": {"external": True, "world_size": 2}}, r"trainer\.world_size has no effect with trainer\.external"),
        ({"trainer": {"external": True, "lora": {}}}, r"trainer\.lora has no effect"),
        ({"algorithm": {"kl_coefficient": 0.1}}, r"algorithm\.kl_coefficient has no effect"),
        ({"optimizer": {"learning_rate": 0.5}}, r"optimizer\.learning_rate has no effect"),
        ({"trackers": ["wandb"]}, "trackers have no effect"),
        ({"schedule": "synchronous"}, 'schedule = "synchronous" is not possible'),
        ({"schedule": "delayed", "max_policy_lag": 1, "algorithm": {}}, 'schedule = "delayed" is not|correction'),
    ],
)
def test_a_key_that_an_external_trainer_ignores_is_refused_by_its_name(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        external(**changes)


def test_an_external_trainer_may_have_groups_of_one_and_columns_that_no_loss_of_ours_reads() -> None:
    spec = external(rollout__group_size=1, stages=[{"type": "reference"}])
    assert spec.trainer.external
    assert spec.stage_plan.stages[0].name == "reference"


def test_a_job_that_has_the_default_loss_of_an_earlier_release_is_read_and_a_new_one_that_names_it_is_refused() -> None:
    earlier = external(algorithm={"loss": "grpo"})
    assert decode(encode(earlier), JobSpec) == earlier
    check_submitted(external())
    with refusal_of("algorithm.loss", match="a process of your own decides it"):
        check_submitted(earlier)
    with pytest.raises(InvalidInput, match=r"algorithm\.loss has no effect"):
        external(algorithm={"loss": "bnpo"})
