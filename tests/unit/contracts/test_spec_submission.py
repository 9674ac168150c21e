"""A new job is refused where log-probs would be wrong or clips could do nothing; one that stands is still read."""

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
SETTINGS: dict[str, Any] = {"top_p": 0.95, "top_k": 50, "min_p": 0.1, "min_new_tokens": 2, "repetition_penalty": 1.1}
CHANGED = {name: {name: value} for name, value in (SETTINGS | {"logit_bias": {"5": 1.0}}).items()}
COMPARED: dict[str, dict[str, Any]] = {
    "the generator": {"algorithm__old_policy": "generator"},
    "tis": {"algorithm__correction": "tis"},
    "a lag": LAG | {"algorithm__correction": "decoupled_ppo"},
    "a reference": {"algorithm__kl_coefficient": 0.1},
    "a teacher": {"stages": [{"type": "teacher", "model": "qwen3"}], "algorithm__distillation_coefficient": 0.1},
}
TAUGHT: dict[str, Any] = {
    "algorithm__distillation_coefficient": 0.1,
    "stages": [
        {
            "type": "external",
            "name": "own",
            "inputs": ["completion_ids"],
            "outputs": [{"name": "teacher_logprobs", "type": "float32", "per": "token"}],
        }
    ],
}
PLUGIN = {"type": "plugin", "entry_point": "own"}


@pytest.mark.parametrize("compared", COMPARED)
@pytest.mark.parametrize("field", CHANGED)
def test_a_changed_distribution_goes_with_every_ratio(field: str, compared: str) -> None:
    sampling = {"rollout__sampling": {"max_new_tokens": 5} | CHANGED[field]}
    check_submitted(job_spec(**sampling, **COMPARED[compared]))


@pytest.mark.parametrize("field", CHANGED)
def test_log_probs_of_a_stage_of_one_s_own_are_refused_beside_it(field: str) -> None:
    check_submitted(job_spec(**TAUGHT))
    with pytest.raises(InvalidInput, match=f"no column tells stage own the distribution that {field} .*made") as caught:
        check_submitted(job_spec(**TAUGHT, rollout__sampling={"max_new_tokens": 5} | CHANGED[field]))
    assert caught.value.field == f"rollout.sampling.{field}"


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
@pytest.mark.parametrize("clip", ["clip_low", "clip_high", "clip_max"])
def test_a_clip_of_a_ratio_that_is_always_1_is_refused(clip: str, loss: str) -> None:
    if (clip, loss) == ("clip_max", "cispo"):
        pytest.skip("it is refused with cispo whatever the ratio is")
    value = 3.0 if clip == "clip_max" else 0.28
    own = {"algorithm": {"loss": loss, clip: value}}
    for options in (own, own | LAG | {"algorithm": {"loss": loss, clip: value, "correction": "none"}}):
        with pytest.raises(InvalidInput, match="the ratio is exactly 1") as caught:
            check_submitted(job_spec(**options))
        assert caught.value.field == f"algorithm.{clip}"
    for acting in ({"updates_per_iteration": 2}, {"mini_batches": 2}, {"old_policy": "generator"}):
        check_submitted(job_spec(algorithm={"loss": loss, clip: value} | acting))


def test_a_loss_of_a_package_may_use_the_clips_as_it_likes() -> None:
    check_submitted(job_spec(algorithm={"loss": PLUGIN, "clip_high": 0.5}))


def test_a_job_that_an_earlier_release_took_is_read_and_a_new_one_is_refused_at_a_spec_file() -> None:
    stands = job_spec(algorithm__clip_high=0.28)
    assert decode(encode(stands), JobSpec) == convert(decode(encode(stands), dict), JobSpec) == stands
    with pytest.raises(InvalidInput, match=r"algorithm\.clip_high"):
        load_spec(DEMO, ["algorithm.clip_high=0.28"])
