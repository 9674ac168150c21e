"""The choices of `[algorithm]`: what is combined, what is refused, and what the defaults are."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from consumer.gradient.losses.family import LOSSES
from consumer.gradient.terms.base import LossSpec, needs_every_row
from consumer.gradient.terms.table import terms_of
from contracts.encoding.wire import convert
from contracts.errors import InvalidInput
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss
from contracts.spec.kinds import LOSS_KINDS, LossName
from contracts.spec.rules import judge
from tests.builders import job_spec, judged_spec
from tests.refusals import refusal_of

KL: dict[str, Any] = {"kl_coefficient": 0.1}


def test_every_loss_of_the_spec_is_in_the_family_and_has_a_clip_range() -> None:
    assert set(get_args(LossName)) == set(LOSSES) == set(LOSS_KINDS)
    assert all(low > 0.0 and high > 0.0 for low, high in (kind.clip_range for kind in LOSS_KINDS.values()))


def test_a_clip_is_the_papers_where_the_spec_has_none() -> None:
    assert AlgorithmSpec() == AlgorithmSpec(loss="dapo")
    assert AlgorithmSpec().clip_range == (0.2, 0.28)
    assert AlgorithmSpec(loss="grpo").clip_range == (0.2, 0.2)
    assert AlgorithmSpec(loss="gspo", clip_high=0.01).clip_range == (3e-4, 0.01)
    assert AlgorithmSpec(loss="cispo", clip_low=0.5).clip_range == (0.5, 4.0)
    assert AlgorithmSpec(correction="tis").correction_range == (0.0, 2.0)
    assert AlgorithmSpec(correction="decoupled_ppo").correction_range == (0.0, 5.0)
    assert AlgorithmSpec(correction="icepop", correction_low=0.9, correction_high=1.1).correction_range == (0.9, 1.1)
    masks: dict[str, Any] = {"correction": "icepop", "correction_level": "geometric", "correction_high": 1.25}
    assert AlgorithmSpec(**masks).correction_range == (0.8, 1.25)
    assert AlgorithmSpec(**masks, correction_low=0.9).correction_range == (0.9, 1.25)


AGAINST_SAMPLER: dict[str, Any] = {"old_policy": "generator"}


@pytest.mark.parametrize(
    ("values", "under_a_lag", "without"),
    [
        (AGAINST_SAMPLER, 3.0, None),
        (AGAINST_SAMPLER | {"loss": "gspo"}, 3.0, None),
        (AGAINST_SAMPLER | {"clip_max": 7.0}, 7.0, 7.0),
        (AGAINST_SAMPLER | {"clip_high": 2.0}, None, None),
        (AGAINST_SAMPLER | {"loss": "cispo"}, None, None),
        (AGAINST_SAMPLER | {"loss": PluginLoss(entry_point="mine")}, None, None),
        ({"correction": "tis", "updates_per_iteration": 2}, None, None),
    ],
)
def test_a_ratio_against_an_older_generator_counts_three_at_most_unless_the_spec_says_otherwise(
    values: dict[str, Any], under_a_lag: float | None, without: float | None
) -> None:
    spec = AlgorithmSpec(**values)
    assert spec.ratio_bound(lags=True) == under_a_lag
    assert spec.ratio_bound(lags=False) == without


@pytest.mark.parametrize(
    ("values", "field", "cure"),
    [
        ({"advantage": "rloo", "advantage_epsilon": 0.1}, "advantage_epsilon has no effect", "leave it out"),
        ({"advantage": "dr_grpo", "advantage_epsilon": 0.1}, "advantage_epsilon has no effect", "leave it out"),
        ({"kl_estimator": "k2"}, "kl_estimator has no effect with kl_coefficient = 0", "set it above 0"),
        ({"kl_placement": "reward"}, "kl_placement has no effect with kl_coefficient = 0", "set it above 0"),
        (KL | {"advantage": "reinforce++_baseline"}, "kl_placement", 'set kl_placement = "reward"'),
        (KL | {"advantage": "gdpo"}, "kl_placement", 'set kl_placement = "reward"'),
        ({"advantage": "gdpo", "on_truncated": "penalise"}, 'on_truncated = "penalise" gives', 'set "mask"'),
        ({"advantage": "none", "reward_clip": 1.0}, "reward_clip has no effect", "leave it out"),
        ({"credit": "turn", "reward_clip": 1.0}, "reward_clip has no effect", "leave it out"),
        ({"gae_lambda": 0.9}, 'gae_lambda has no effect with advantage = "grpo"', "leave it out"),
        ({"advantage": "rloo", "value_clip": 0.2}, "value_clip has no effect", 'set "gae"'),
        ({"whiten_advantages": False}, 'whiten_advantages has no effect with advantage = "grpo"', 'set "gae"'),
        ({"advantage": "gae", "whiten_advantages": False, "advantage_epsilon": 1}, "advantage_epsilon", "leave it out"),
        ({"advantage": "gae", "value_clip": 0.2}, "value_clip has no effect with one step", "updates_per_iteration"),
        ({"advantage": "gae", "credit": "turn"}, 'credit = "turn" compares the turns of a group', '"trajectory"'),
        ({"advantage": "gae", "loss": {"type": "plugin", "entry_point": "mine"}}, "advantage", "a loss of the family"),
        ({"entropy_coefficient": 0.1, "advantage": "reinforce++_baseline"}, "entropy_coefficient would", "set it to 0"),
        ({"advantage": "gdpo", "distillation_coefficient": 1}, "distillation_coefficient would", 'or "none"'),
        ({"advantage": "gae", "off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold", "leave it out"),
        ({"clip_max": 3.0, "loss": "cispo"}, "clip_max has no effect", "leave it out"),
        ({"clip_max": 1.2, "updates_per_iteration": 2}, "clip_max = 1.2 is not above 1 + clip_high", "which is 1.2"),
        ({"use_bias_correction_kl": True}, "use_bias_correction_kl weighs the KL in the loss", "leave it out"),
        (KL | {"kl_placement": "reward", "use_bias_correction_kl": True}, "use_bias_correction_kl", "leave it out"),
        ({"advantage": "none", "distillation_coefficient": 1, "clip_max": 3}, "clip_max has no effect", "leave it out"),
        ({"correction_level": "sequence"}, "correction_level has no effect without a correction", "choose one"),
        ({"correction_high": 2.0}, "correction_high has no effect without a correction", "choose one"),
        ({"correction_low": 0.5}, "correction_low has no effect without a correction", "choose one"),
        ({"correction": "decoupled_ppo", "correction_low": 0.5}, "correction_low has no effect", "leave it out"),
        ({"correction": "decoupled_ppo", "loss": "gspo"}, "correction_level", 'set correction_level = "sequence"'),
        ({"correction": "tis", "correction_low": 0.5}, "correction_low has no effect", "leave it out"),
        ({"correction": "tis", "old_policy": "generator"}, "correction would count", "set one of the two"),
        ({"correction": "tis", "loss": "gspo"}, "correction_level", 'set correction_level = "sequence"'),
        ({"correction": "icepop", "correction_low": 1, "correction_high": 1}, "correction_low", "lower correction_low"),
    ],
)
def test_a_combination_without_meaning_is_refused_with_field_and_cure(
    values: dict[str, Any], field: str, cure: str
) -> None:
    key, _, problem = field.partition(" ")
    refusals = [refusal for refusal in judge(job_spec(algorithm=values)) if refusal.field == f"algorithm.{key}"]
    words = [f"{refusal.problem}; {refusal.cure}" for refusal in refusals]
    assert any(problem.removeprefix("= ") in line and cure in line for line in words), words


@pytest.mark.parametrize(
    "values",
    [
        KL,
        KL | {"kl_estimator": "k1", "kl_placement": "reward", "advantage": "reinforce++_baseline"},
        KL | {"kl_estimator": "k2", "entropy_coefficient": 0.01, "loss": "dapo"},
        {"correction": "icepop", "correction_level": "sequence", "loss": "gspo"},
        {"correction": "tis", "loss": "cispo", "advantage": "rloo"},
        {"correction": "decoupled_ppo", "loss": "dapo", "advantage": "reinforce++_baseline"},
        {"advantage": "reinforce++_baseline", "old_policy": "generator", "updates_per_iteration": 2},
        {"old_policy": "generator", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
        KL | {"kl_estimator": "k1", "use_bias_correction_kl": True},
        KL | {"kl_estimator": "k1", "clip_max": 3.0, "updates_per_iteration": 2},
        {"correction": "icepop", "correction_level": "geometric", "loss": "gspo", "off_policy_mask_threshold": 0.2},
        KL | {"advantage": "gae", "kl_placement": "reward", "value_clip": 0.2, "mini_batches": 2},
        {"advantage": "gae", "advantage_epsilon": 1e-8},
    ],
)
def test_what_papers_combine_is_accepted(values: dict[str, Any]) -> None:
    assert convert(values, AlgorithmSpec) == AlgorithmSpec(**values)


LAGS: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 1}


@pytest.mark.parametrize(
    ("values", "weighs"),
    [
        (KL, True),
        (KL | {"kl_estimator": "k1"}, True),
        (KL | {"kl_estimator": "k2"}, True),
        (KL | {"use_bias_correction_kl": True}, True),
        (KL | {"use_bias_correction_kl": False}, False),
        (KL | {"kl_placement": "reward"}, False),
        ({}, False),
    ],
)
def test_a_kl_in_the_loss_is_weighed_unless_the_spec_says_no(values: dict[str, Any], weighs: bool) -> None:
    assert AlgorithmSpec(**values).weighs_kl is weighs
    assert AlgorithmSpec(**values, updates_per_iteration=2).weighs_kl is weighs


def test_an_unweighed_k1_in_the_loss_is_refused_and_a_weighed_one_is_taken() -> None:
    estimate = KL | {"kl_estimator": "k1"}
    unweighed = estimate | {"use_bias_correction_kl": False}
    judged_spec(**LAGS, algorithm=estimate | {"correction": "none"})
    judged_spec(algorithm=estimate)
    judged_spec(algorithm=estimate | {"use_bias_correction_kl": True})
    for job in ({"algorithm": unweighed}, LAGS | {"algorithm": unweighed | {"correction": "none"}}):
        with refusal_of("algorithm.kl_estimator", match=r'"k1" in .*, or set kl_placement = "reward"'):
            judged_spec(**job)


def test_the_advantage_that_was_taken_off_late_is_refused_with_the_one_that_takes_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"algorithm.advantage: .*did you mean reinforce\+\+_baseline\?"):
        job_spec(algorithm={"advantage": "reinforce++"})


def test_only_what_acts_on_every_token_needs_every_row() -> None:
    def needs(**values: Any) -> bool:
        return needs_every_row(terms_of(LossSpec(algorithm=AlgorithmSpec(**values), measures_entropy=True)))

    assert not needs(loss="dapo", correction="tis", advantage="rloo")
    assert needs(kl_coefficient=0.1)
    assert needs(kl_coefficient=0.1, kl_placement="reward")
    assert needs(entropy_coefficient=0.1)
    assert needs(distillation_coefficient=0.1)
    assert needs(distillation_coefficient=0.1, distillation_beta=0.0)
    assert needs(advantage="gae")
    assert needs(loss="sft", advantage="none")
