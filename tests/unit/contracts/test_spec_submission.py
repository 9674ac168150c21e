"""A new job is refused where log-probs would be wrong or clips could do nothing; one that stands is still read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.encoding.wire import convert, decode, encode
from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from contracts.spec.submission import check_submitted
from contracts.spec.trainer import HEALTH_RULES
from onbeat.client.spec_file import load_spec
from tests.builders import job_spec
from tests.refusals import refusal_of

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
DIVERGES: dict[str, Any] = {
    "algorithm__advantage": "none",
    "algorithm__distillation_coefficient": 0.1,
    "algorithm__distillation_beta": 0.5,
    "stages": [{"type": "teacher", "model": "qwen3", "top_k": 2}],
}
"""Beside it nothing weighs what was sampled, but a KL that is weighed."""
PLUGIN = {"type": "plugin", "entry_point": "own"}


@pytest.mark.parametrize("compared", COMPARED)
@pytest.mark.parametrize("field", CHANGED)
def test_a_changed_distribution_goes_with_every_ratio(field: str, compared: str) -> None:
    sampling = {"rollout__sampling": {"max_new_tokens": 5} | CHANGED[field]}
    check_submitted(job_spec(**sampling, **COMPARED[compared]))


@pytest.mark.parametrize("field", CHANGED)
def test_log_probs_of_a_stage_of_one_s_own_are_refused_beside_it(field: str) -> None:
    check_submitted(job_spec(**TAUGHT))
    with refusal_of(f"rollout.sampling.{field}", match=f"stage own the distribution that {field} .*made"):
        check_submitted(job_spec(**TAUGHT, rollout__sampling={"max_new_tokens": 5} | CHANGED[field]))


@pytest.mark.parametrize("field", ["min_new_tokens", "repetition_penalty", "logit_bias"])
def test_an_external_trainer_is_told_what_was_kept_and_no_changed_logits(field: str) -> None:
    external: dict[str, Any] = {"trainer": {"external": True}, "deterministic": False}
    check_submitted(job_spec(**external, rollout__sampling={"max_new_tokens": 5, "top_p": 0.9}))
    with refusal_of(f"rollout.sampling.{field}", match="no row tells an external trainer"):
        check_submitted(job_spec(**external, rollout__sampling={"max_new_tokens": 5} | CHANGED[field]))


GIVEN: dict[str, Any] = {
    "algorithm": {"loss": "sft", "advantage": "none"},
    "rollout__group_size": 1,
    "reward__components": [],
    "evaluation__num_prompts": 0,
}


@pytest.mark.parametrize(
    ("rule", "job"),
    [
        *(("entropy_gone", GIVEN), ("reward_collapsed", GIVEN), ("truncations_rising", GIVEN)),
        *(("completions_cut", GIVEN), ("completions_unscorable", GIVEN), ("mismatch_unusual", GIVEN)),
        ("mismatch_unusual", {"model__dtype": "bfloat16"}),
        *(("mismatch_high", GIVEN), ("score_collapsed", {}), ("score_collapsed", {"evaluation__every_iterations": 4})),
        *(("lag_too_large", {}), ("mismatch_high", LAG | {"algorithm__correction": "tis"})),
        ("score_collapsed", {"evaluation": {"num_prompts": 0, "every_iterations": 1}}),
        ("groups_equal", {"algorithm__advantage": "gae"}),
    ],
)
def test_an_end_by_a_rule_that_is_never_broken_is_refused(rule: str, job: dict[str, Any]) -> None:
    with refusal_of("trainer.stop_on", match=f'"{rule}" is never said: '):
        check_submitted(job_spec(**job, trainer__stop_on=[rule]))


def test_ends_by_rules_that_can_be_broken_are_taken_and_an_alarm_about_what_isn_t_sampled_is_not() -> None:
    rules = sorted(HEALTH_RULES.keys() - {"lag_too_large", "kl_high"})
    check_submitted(job_spec(trainer__stop_on=rules, evaluation__every_iterations=3))
    check_submitted(job_spec(**LAG, algorithm__correction="tis", trainer__stop_on=["lag_too_large"]))
    with pytest.raises(InvalidInput, match=r'trainer.entropy_alarm: it has no effect: loss = "sft" samples nothing'):
        check_submitted(job_spec(**GIVEN, trainer__entropy_alarm=0.1))


AS_SAMPLED: dict[str, Any] = {"trainer__packing": "as_sampled"}
MASKED: dict[str, Any] = {"algorithm__off_policy_mask_threshold": 0.1}
SYNCED: dict[str, Any] = {"algorithm__kl_coefficient": 0.1, "algorithm__ref_model_sync_iterations": 3}
ROWS: dict[str, Any] = {"type": "jsonl", "train_path": "rows.jsonl", "metadata_columns": ["tests"]}
MIXED: dict[str, Any] = {
    "type": "mixture",
    "sources": [{"name": name, "dataset": ROWS} for name in ("algebra", "code")],
}
SHUFFLED: dict[str, Any] = {"algorithm__shuffle_rewards": True}
QUIET: dict[str, Any] = {"trainer__measure_entropy": False}
WEIGHED: dict[str, Any] = {"type": "reward_model", "model": "scorer"}
FROZEN: dict[str, Any] = {"parameters": ["*embed*"], "learning_rate_factor": 0.0}


CRITIC: dict[str, Any] = {"algorithm__advantage": "gae"}
ALONE: dict[str, Any] = {"rollout__group_size": 1, "rollout__prompts_per_batch": 1}


def masks(**changes: Any) -> dict[str, Any]:
    """A correction that leaves whole responses out."""
    return {f"algorithm__{key}": value for key, value in ({"correction_level": "geometric"} | changes).items()}


def hosts(**changes: Any) -> dict[str, Any]:
    """A trainer of two hosts."""
    return {"trainer__hosts": {"most": 2} | changes, "weights": {"transport": "object"}}


@pytest.mark.parametrize(
    ("job", "field", "why"),
    [
        (AS_SAMPLED | {"algorithm__correction": "tis"}, "algorithm.correction", "without a lag packing"),
        (AS_SAMPLED | {"algorithm__old_policy": "generator"}, "algorithm.old_policy", "without a lag packing"),
        (AS_SAMPLED | MASKED, "algorithm.off_policy_mask_threshold", "without a lag packing"),
        (AS_SAMPLED | {"trainer__mismatch_alarm": 0.5}, "trainer.mismatch_alarm", "any difference is an alarm"),
        (GIVEN | {"trainer__mismatch_alarm": 0.5}, "trainer.mismatch_alarm", "samples nothing"),
        (GIVEN | {"trainer__on_mismatch": "fail"}, "trainer.on_mismatch", "samples nothing"),
        (GIVEN | {"stages": [WEIGHED]}, "stages", "reward_model has no effect: loss = .sft. samples nothing"),
        (QUIET | {"algorithm__entropy_coefficient": 0.1}, "trainer.measure_entropy", "measures it, too"),
        (DIVERGES | {"algorithm__correction": "tis"}, "algorithm.correction", "it weighs no sampled token"),
        (DIVERGES | {"algorithm__old_policy": "generator"}, "algorithm.old_policy", "it weighs no sampled token"),
        (SYNCED | {"iterations": 3}, "algorithm.ref_model_sync_iterations", "the job ends first"),
        (SHUFFLED | COMPARED["a teacher"], "algorithm.shuffle_rewards", "a teacher teaches all the same"),
        ({"rollout__sampling__top_k": 1}, "rollout.sampling.top_k", "equal samples"),
        ({"rollout__sampling": {"max_new_tokens": 5, "top_p": 0.9, "min_p": 1.0}}, "rollout.sampling.min_p", "equal"),
        (masks(correction="tis", correction_high=1.01), "algorithm.correction_level", "is no weight, which tis needs"),
        (LAG | masks(correction="decoupled_ppo"), "algorithm.correction_level", "it only leaves responses out"),
        (masks(correction="icepop"), "algorithm.correction_high", "hardly leaves 1"),
        (masks(correction="icepop", correction_high=1.0), "algorithm.correction_high", "hardly leaves 1"),
        ({"optimizer__critic_learning_rate_factor": 2.0}, "optimizer.critic_learning_rate_factor", "trains no critic"),
        (CRITIC | ALONE, "rollout.prompts_per_batch", "has its own tokens alone to whiten them by"),
        (hosts(least=2, regroup_s=30.0), "trainer.hosts.regroup_s", "least hosts are the most"),
        ({"optimizer__groups": [FROZEN | {"weight_decay": 0.1}]}, "optimizer.groups[0].weight_decay", "times the"),
        ({"dataset": ROWS}, "dataset.metadata_columns", "no reward of type plugin"),
        ({"dataset": MIXED}, "dataset.sources[0].dataset.metadata_columns", "no reward of type plugin"),
    ],
)
def test_a_setting_that_could_do_nothing_is_refused_by_its_name(job: dict[str, Any], field: str, why: str) -> None:
    with refusal_of(field, match=why):
        check_submitted(job_spec(**job))


@pytest.mark.parametrize(
    "job",
    [
        AS_SAMPLED | LAG | MASKED | {"algorithm__correction": "tis"},
        AS_SAMPLED | MASKED | {"algorithm__updates_per_iteration": 2},
        AS_SAMPLED | {"algorithm__correction": "none", "trainer__on_mismatch": "fail"},
        GIVEN | QUIET,
        DIVERGES | LAG | {"algorithm__correction": "tis", "algorithm__kl_coefficient": 0.1},
        SYNCED,
        SHUFFLED | COMPARED["a reference"],
        {"rollout__sampling": {"max_new_tokens": 5, "top_k": 2, "min_p": 0.9}},
        {"dataset": MIXED, "reward__components": [PLUGIN]},
        {"stages": [WEIGHED]},
        hosts(least=1, regroup_s=30.0),
        hosts(least=2),
        masks(correction="icepop", correction_high=1.01),
        CRITIC | {"optimizer__critic_learning_rate_factor": 2.0, "rollout__group_size": 1},
        CRITIC | ALONE | {"algorithm__whiten_advantages": False},
        {"optimizer__groups": [FROZEN, {"parameters": ["*norm*"], "weight_decay": 0.1}]},
    ],
)
def test_one_that_acts_is_taken(job: dict[str, Any]) -> None:
    check_submitted(job_spec(**job))


def test_a_padded_pass_takes_no_trajectory_of_several_parts() -> None:
    anew: dict[str, Any] = {"environment": {"name": "game", "max_tokens": 64, "max_context_tokens": 32}}
    check_submitted(job_spec(**anew))
    with pytest.raises(InvalidInput, match=r"environment.max_context_tokens: a padded pass has all parts"):
        check_submitted(job_spec(**anew, trainer__packing="padded"))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo"])
@pytest.mark.parametrize("clip", ["clip_low", "clip_high", "clip_max"])
def test_a_clip_of_a_ratio_that_is_always_1_is_refused(clip: str, loss: str) -> None:
    if (clip, loss) == ("clip_max", "cispo"):
        pytest.skip("it is refused with cispo whatever the ratio is")
    value = 3.0 if clip == "clip_max" else 0.28
    own = {"algorithm": {"loss": loss, clip: value}}
    for options in (own, own | LAG | {"algorithm": {"loss": loss, clip: value, "correction": "none"}}):
        with refusal_of(f"algorithm.{clip}", match="the ratio is exactly 1"):
            check_submitted(job_spec(**options))
    for acting in ({"updates_per_iteration": 2}, {"mini_batches": 2}, {"old_policy": "generator"}):
        check_submitted(job_spec(algorithm={"loss": loss, clip: value} | acting))


def test_a_loss_of_a_package_may_use_the_clips_as_it_likes() -> None:
    check_submitted(job_spec(algorithm={"loss": PLUGIN, "clip_high": 0.5}))


def test_a_job_that_an_earlier_release_took_is_read_and_a_new_one_is_refused_at_a_spec_file() -> None:
    stands = job_spec(algorithm__clip_high=0.28)
    assert decode(encode(stands), JobSpec) == convert(decode(encode(stands), dict), JobSpec) == stands
    with pytest.raises(InvalidInput, match=r"algorithm\.clip_high"):
        load_spec(DEMO, ["algorithm.clip_high=0.28"])
