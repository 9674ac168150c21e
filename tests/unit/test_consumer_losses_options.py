"""The choices of `[algorithm]`: what is combined, what is refused, and what stands where nothing is said."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from consumer.losses.family import LOSSES
from contracts.algorithm import CLIP_RANGES, AlgorithmSpec
from contracts.errors import InvalidInput
from contracts.wire import convert
from tests.builders import job_spec

KL = {"kl_coefficient": 0.1}


def test_every_loss_of_the_spec_is_in_the_family_and_has_a_clip_range() -> None:
    names = set(get_args(get_type_hints(AlgorithmSpec)["loss"]))
    assert names == set(LOSSES) == set(CLIP_RANGES)


def test_a_clip_is_the_papers_where_the_spec_has_none() -> None:
    assert AlgorithmSpec().clip_range == (0.2, 0.2)
    assert AlgorithmSpec(loss="dapo").clip_range == (0.2, 0.28)
    assert AlgorithmSpec(loss="gspo", clip_high=0.01).clip_range == (3e-4, 0.01)
    assert AlgorithmSpec(loss="cispo", clip_low=0.5).clip_range == (0.5, 4.0)
    assert AlgorithmSpec(correction="tis").correction_range == (0.0, 2.0)
    assert AlgorithmSpec(correction="icepop", correction_low=0.9, correction_high=1.1).correction_range == (0.9, 1.1)


@pytest.mark.parametrize(
    ("values", "field", "cure"),
    [
        ({"advantage": "rloo", "advantage_epsilon": 0.1}, "advantage_epsilon has no effect", "leave it out"),
        ({"advantage": "dr_grpo", "advantage_epsilon": 0.1}, "advantage_epsilon has no effect", "leave it out"),
        ({"kl_estimator": "k2"}, "kl_coefficient is 0", "set it above 0"),
        ({"kl_placement": "reward"}, "kl_coefficient is 0", "set it above 0"),
        (KL | {"kl_estimator": "k1"}, "kl_estimator", 'use "k2" there, or kl_placement = "reward"'),
        (KL | {"advantage": "reinforce++_baseline"}, "kl_placement", 'set kl_placement = "reward"'),
        (
            {"entropy_coefficient": 0.1, "advantage": "reinforce++_baseline"},
            "entropy_coefficient would be divided",
            "set it to 0",
        ),
        ({"correction_level": "sequence"}, "correction is", 'choose "tis" or "icepop"'),
        ({"correction_high": 2.0}, "correction is", 'choose "tis" or "icepop"'),
        ({"correction_low": 0.5}, "correction is", 'choose "tis" or "icepop"'),
        ({"correction": "tis", "correction_low": 0.5}, "correction_low has no effect", "leave it out"),
        ({"correction": "tis", "old_policy": "generator"}, "correction would count", "set one of the two"),
        ({"correction": "tis", "loss": "gspo"}, "correction_level", 'set correction_level = "sequence"'),
        (
            {"correction": "icepop", "correction_low": 1.0, "correction_high": 1.0},
            "correction_low and correction_high",
            "lower correction_low",
        ),
    ],
)
def test_a_combination_without_meaning_is_refused_with_field_and_cure(
    values: dict[str, Any], field: str, cure: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        job_spec(algorithm=values)
    assert str(refusal.value).startswith(f"algorithm: {field}")
    assert cure in str(refusal.value)


@pytest.mark.parametrize(
    "values",
    [
        KL,
        KL | {"kl_estimator": "k1", "kl_placement": "reward", "advantage": "reinforce++_baseline"},
        KL | {"kl_estimator": "k2", "entropy_coefficient": 0.01, "loss": "dapo"},
        {"correction": "icepop", "correction_level": "sequence", "loss": "gspo"},
        {"correction": "tis", "loss": "cispo", "advantage": "rloo"},
        {"old_policy": "generator", "loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    ],
)
def test_what_papers_combine_is_accepted(values: dict[str, Any]) -> None:
    assert convert(values, AlgorithmSpec) == AlgorithmSpec(**values)


def test_only_what_acts_on_every_token_needs_every_row() -> None:
    assert not AlgorithmSpec(loss="dapo", correction="tis", advantage="rloo").needs_every_row
    assert AlgorithmSpec(kl_coefficient=0.1).needs_every_row
    assert AlgorithmSpec(kl_coefficient=0.1, kl_placement="reward").needs_every_row
    assert AlgorithmSpec(entropy_coefficient=0.1).needs_every_row
