"""A new job is refused where its ratios would be wrong or its clips could do nothing; one that stands is still read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.wire import convert, decode, encode
from contracts.errors import InvalidInput
from contracts.spec import JobSpec
from contracts.spec_submission import check_submitted
from onbeat.client.spec_file import load_spec
from tests.builders import job_spec

DEMO = Path(__file__).parents[3] / "configs" / "demo.toml"
LAG: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 1}
TRUNCATED: dict[str, dict[str, Any]] = {
    "rollout.sampling.top_p": {"rollout__sampling__top_p": 0.95},
    "rollout.sampling.top_k": {"rollout__sampling__top_k": 50},
}
COMPARED: dict[str, dict[str, Any]] = {
    'algorithm.old_policy = "generator"': {"algorithm__old_policy": "generator"},
    'algorithm.correction = "tis"': {"algorithm__correction": "tis"},
    'algorithm.correction = "icepop"': {"algorithm__correction": "icepop"},
    "max_policy_lag = 1": LAG | {"algorithm__correction": "none"},
    'algorithm.correction = "decoupled_ppo"': LAG | {"algorithm__correction": "decoupled_ppo"},
}
PLUGIN = {"type": "plugin", "entry_point": "own"}


@pytest.mark.parametrize("compared", COMPARED)
@pytest.mark.parametrize("field", TRUNCATED)
def test_truncated_sampling_beside_a_ratio_against_the_generator_is_refused(field: str, compared: str) -> None:
    for allowed in (TRUNCATED[field], COMPARED[compared]):
        check_submitted(job_spec(**allowed))
    with pytest.raises(InvalidInput) as caught:
        check_submitted(job_spec(**TRUNCATED[field], **COMPARED[compared]))
    assert caught.value.field == field
    assert compared in caught.value.problem
    assert "top_p = 1.0 and top_k = 0" in caught.value.cure


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
@pytest.mark.parametrize("clip", ["clip_low", "clip_high"])
def test_a_clip_of_a_ratio_that_is_always_1_is_refused(clip: str, loss: str) -> None:
    own = {"algorithm": {"loss": loss, clip: 0.28}}
    for options in (own, own | LAG | {"algorithm": {"loss": loss, clip: 0.28, "correction": "none"}}):
        with pytest.raises(InvalidInput, match="the ratio is exactly 1") as caught:
            check_submitted(job_spec(**options))
        assert caught.value.field == f"algorithm.{clip}"
    for acting in ({"updates_per_iteration": 2}, {"old_policy": "generator"}):
        check_submitted(job_spec(algorithm={"loss": loss, clip: 0.28} | acting))


def test_a_loss_of_a_package_may_use_the_clips_as_it_likes() -> None:
    check_submitted(job_spec(algorithm={"loss": PLUGIN, "clip_high": 0.5}))


def test_a_job_that_an_earlier_release_took_is_read_and_a_new_one_is_refused_at_a_spec_file() -> None:
    stands = job_spec(algorithm__clip_high=0.28)
    assert decode(encode(stands), JobSpec) == convert(decode(encode(stands), dict), JobSpec) == stands
    with pytest.raises(InvalidInput, match=r"algorithm\.clip_high"):
        load_spec(DEMO, ["algorithm.clip_high=0.28"])
