"""The judge of a spec: each rule refuses a spec, its cure is taken, and all refusals come at once."""

from __future__ import annotations

import copy
import functools
import time

import pytest

from contracts.encoding.wire import decode, encode
from contracts.errors import MOST_REFUSALS, SpecRefused
from contracts.spec.job import JobSpec
from contracts.spec.reading import read_values
from contracts.spec.rules import RULES, Rule, check_spec, judge, refusals_of
from contracts.spec.trainer import HEALTH_RULES
from tests.builders import job_spec, judged_spec, spec_values
from tests.unit.contracts.spec_examples import (
    AS_SAMPLED,
    CRITIC,
    EXAMPLES,
    FLOAT,
    FSDP,
    HOSTS,
    KL,
    LAG,
    LORA,
    RESAMPLES,
    SFT,
    TAUGHT,
    TWO_STEPS,
    WIDELY_TAUGHT,
    Example,
    Fields,
    own,
    sampled,
)

IDS = [f"{example.field}: {example.says}"[:80] for example in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_a_spec_that_breaks_a_rule_is_refused_by_its_key_with_a_cure(example: Example) -> None:
    refusals = [refusal for refusal in judge(job_spec(**example.broken)) if refusal.field == example.field]
    assert any(example.says in refusal.problem for refusal in refusals), judge(job_spec(**example.broken))
    assert all(refusal.cure for refusal in refusals)


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_a_spec_that_takes_the_cure_is_refused_by_nothing(example: Example) -> None:
    assert judge(job_spec(**example.cure)) == []


@pytest.mark.parametrize("rule", RULES, ids=[f"{rule.field}: {rule.says}"[:80] for rule in RULES])
def test_each_rule_refuses_an_example_and_takes_another(rule: Rule) -> None:
    answers = {bool(list(rule.refusals(job_spec(**example.broken)))) for example in EXAMPLES}
    assert answers == {True, False}


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_a_wrong_key_elsewhere_hides_no_rule(example: Example) -> None:
    spec = job_spec(**example.broken)
    values = spec_values(**example.broken)
    values["timeouts"] = values.get("timeouts", {}) | {"iteraton_s": 60.0}
    unknown, *rules = refusals_of(read_values(values))
    assert unknown.field == "timeouts.iteraton_s"
    assert rules == judge(spec)


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
@pytest.mark.parametrize("fault", ["a letter too much", "another type"])
def test_a_wrong_key_is_refused_alone_where_the_spec_is_right_with_it(example: Example, fault: str) -> None:
    """Nothing is refused for the lack of a key that is there by another name, or with another value."""
    for path in example.cure:
        values = copy.deepcopy(spec_values(**example.cure))
        *parents, leaf = path.split("__")
        table = functools.reduce(lambda table, key: table[key], parents, values)
        value = table.pop(leaf)
        key = leaf
        if fault == "a letter too much":
            key = f"{leaf}x"
            table[key] = value
        else:
            table[key] = 3 if isinstance(value, list) else [[None]]
        refusals = refusals_of(read_values(values))
        assert [refusal.field for refusal in refusals] == [".".join([*parents, key])]


def test_all_refusals_of_a_spec_come_at_once_in_the_order_of_the_table() -> None:
    spec = job_spec(trainer__kl_alarm=0.1, tags=["a", "a"], algorithm__mini_batches=3)
    assert [refusal.field for refusal in judge(spec)] == ["tags", "algorithm.mini_batches", "trainer.kl_alarm"]
    with pytest.raises(SpecRefused) as refused:
        check_spec(spec)
    assert str(refused.value).splitlines() == [
        "tags: has the same name twice (give each name once)",
        "algorithm.mini_batches: 3 does not divide rollout.batches_per_iteration = 4 "
        "(choose a divisor of rollout.batches_per_iteration)",
        "trainer.kl_alarm: has no effect with algorithm.kl_coefficient = 0 (leave it out)",
    ]
    assert (refused.value.field, refused.value.problem, refused.value.cure) == (
        "tags",
        "has the same name twice",
        "give each name once",
    )


@pytest.mark.parametrize(
    "broken", [LAG | {"schedule": "periodic"}, SFT | {"algorithm__kl_estimator": "k2"}, KL | {"rollout__group_size": 1}]
)
def test_one_mistake_is_one_refusal(broken: dict[str, object]) -> None:
    assert len(judge(job_spec(**broken))) == 1


BREAKABLE = sorted(HEALTH_RULES.keys() - {"lag_too_large", "kl_high"})
COMPARED: dict[str, Fields] = {
    "the generator": {"algorithm__old_policy": "generator"},
    "tis": {"algorithm__correction": "tis"},
    "a lag": LAG | {"algorithm__correction": "decoupled_ppo"},
    "a reference": KL,
    "a teacher": TAUGHT,
}
CHANGED: Fields = {
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.1,
    "min_new_tokens": 2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
}


@pytest.mark.parametrize("compared", COMPARED)
@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_distribution_goes_with_every_ratio(key: str, compared: str) -> None:
    judged_spec(**sampled(**{key: CHANGED[key]}), **COMPARED[compared])


@pytest.mark.parametrize(
    "fields",
    [
        FLOAT,
        CRITIC | {"rollout__group_size": 1},
        FSDP | LORA | {"optimizer__type": "adamw_8bit"},
        RESAMPLES | KL | {"rollout__max_resamples": 16},
        AS_SAMPLED | LAG | {"algorithm__off_policy_mask_threshold": 0.1, "algorithm__correction": "tis"},
        AS_SAMPLED | TWO_STEPS | {"algorithm__off_policy_mask_threshold": 0.1},
        AS_SAMPLED | {"algorithm__correction": "none", "trainer__on_mismatch": "fail"},
        SFT | {"trainer__measure_entropy": False, "reward__components": [], "evaluation__num_prompts": 0},
        WIDELY_TAUGHT | LAG | KL | {"algorithm__correction": "tis"},
        KL | {"algorithm__shuffle_rewards": True},
        HOSTS | {"trainer__hosts": {"least": 2, "most": 2}},
        {
            "trainer__stop_on": sorted(HEALTH_RULES.keys() - {"lag_too_large", "kl_high"}),
            "evaluation__every_iterations": 3,
        },
        LAG | {"algorithm__correction": "tis", "trainer__stop_on": ["lag_too_large"]},
    ],
)
def test_a_spec_whose_keys_all_act_is_taken(fields: Fields) -> None:
    judged_spec(**fields)


def test_a_hostile_spec_has_a_bounded_number_of_refusals_in_bounded_time() -> None:
    names = [f"column_{number}" for number in range(32)]
    spec = job_spec(stages=[own(name=f"own_{number}", inputs=names) for number in range(16)])
    started_s = time.process_time()
    assert len(judge(spec)) == MOST_REFUSALS
    assert time.process_time() - started_s < 1.0


def test_a_refused_spec_is_read_all_the_same_so_that_a_job_of_it_can_be_looked_at() -> None:
    spec = job_spec(algorithm__clip_high=0.28)
    assert judge(spec)
    assert decode(encode(spec), JobSpec) == spec
