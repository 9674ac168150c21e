"""Which versions sample an iteration, and which specs of a lag are refused: from TOML and over HTTP, in one line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput
from contracts.jobs import ResumeRequest, resumed_spec
from contracts.schedule import LAGGING, MAX_POLICY_LAG, Schedule, ScheduleName
from contracts.spec.job import JobSpec
from contracts.spec.kinds import CorrectionName
from contracts.spec.reading import read_json
from contracts.spec.rules import check_spec
from onbeat.client.spec_file import load_spec
from tests.builders import job_spec, judged_spec
from tests.refusals import refusal_of

DELAYED: dict[str, Any] = {"schedule": "delayed", "max_policy_lag": 2}
BOUNDED: dict[str, Any] = {"schedule": "bounded", "max_policy_lag": 2, "deterministic": False}
GENERATOR = {"old_policy": "generator"}
TIS = {"correction": "tis"}
TOML = """
name = "lagging"
iterations = 4
{top}
[model]
path = "model"
[dataset]
type = "addition"
[reward]
components = [{{ type = "exact" }}]
[algorithm]
{algorithm}
"""
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a lag of periodic": ({"max_policy_lag": 1}, {}, 'no effect with schedule = "periodic"', '"delayed" or "bounded"'),
    "a lag of synchronous": ({"schedule": "synchronous", "max_policy_lag": 1}, TIS, '= "synchronous"', "set it to 0"),
    "a lag of colocated": ({"schedule": "colocated", "max_policy_lag": 16}, {}, '= "colocated"', "set it to 0"),
    "delayed without a lag": (
        {"schedule": "delayed"},
        TIS,
        'the same as schedule = "periodic"',
        "max_policy_lag to 1 or more",
    ),
    "bounded without a lag": (
        {"schedule": "bounded", "deterministic": False},
        TIS,
        'schedule: "bounded" with max_policy_lag = 0 is the same as schedule = "periodic"',
        "max_policy_lag to 1 or more",
    ),
    "a lag of all iterations": (
        {"schedule": "delayed", "max_policy_lag": 4},
        TIS,
        "max_policy_lag: 4 is too large: it must be below iterations = 4",
        "lower max_policy_lag, or raise iterations",
    ),
    "a lag without a correction": (
        DELAYED,
        {},
        "algorithm.correction: must be named with max_policy_lag = 2: samples of an older policy make the gradient a "
        "biased one",
        'choose "tis", "icepop" or "decoupled_ppo", or "none"',
    ),
    "a bounded lag without a correction": (BOUNDED, {}, "algorithm.correction: must be named", 'choose "tis"'),
    "a lag against the generator's ratio, unnamed": (
        DELAYED,
        GENERATOR,
        "algorithm.correction: must be named with max_policy_lag = 2",
        'set it to "none", since under old_policy = "generator" the ratio is against the policy that sampled already',
    ),
    "a lag that is corrected twice": (DELAYED, GENERATOR | TIS, "count the generator twice", "set one of the two"),
    "decoupled PPO without a lag": (
        {},
        {"correction": "decoupled_ppo"},
        'algorithm.correction: "decoupled_ppo" has no effect of its own with max_policy_lag = 0',
        'choose "tis" or "icepop" against the gap between the engines',
    ),
    "decoupled PPO by its old name": (DELAYED, {"correction": "decoupled"}, "algorithm", "did you mean decoupled_ppo?"),
    "bounded and deterministic": (
        BOUNDED | {"deterministic": True},
        TIS,
        'deterministic: is not possible with schedule = "bounded"',
        'set deterministic = false, or schedule = "delayed"',
    ),
    "a schedule that is none": ({"schedule": "delay"}, {}, "schedule: invalid", "did you mean delayed? One of"),
}


def from_toml(folder: Path, top: dict[str, Any], algorithm: dict[str, Any]) -> JobSpec:
    def lines(values: dict[str, Any]) -> str:
        return "\n".join(f"{key} = {encode_json(value).decode()}" for key, value in values.items())

    path = folder / "job.toml"
    path.write_text(TOML.format(top=lines(top), algorithm=lines(algorithm)))
    return load_spec(path)


def over_http(top: dict[str, Any], algorithm: dict[str, Any]) -> JobSpec:
    body = {
        "name": "lagging",
        "iterations": 4,
        "model": {"path": "model"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "algorithm": algorithm,
    }
    spec = read_json(encode_json(body | top)).whole
    check_spec(spec)
    return spec


@pytest.mark.parametrize("name", REFUSED)
def test_a_spec_whose_lag_has_no_meaning_is_refused_with_field_reason_and_cure(name: str, tmp_path: Path) -> None:
    top, algorithm, problem, cure = REFUSED[name]
    with pytest.raises(InvalidInput) as read:
        from_toml(tmp_path, top, algorithm)
    with pytest.raises(InvalidInput) as sent:
        over_http(top, algorithm)
    assert str(sent.value) == str(read.value)
    assert problem in str(sent.value)
    assert cure in str(sent.value)
    assert "\n" not in str(sent.value)


@pytest.mark.parametrize("schedule", [DELAYED, BOUNDED])
@pytest.mark.parametrize(
    "algorithm", [*({"correction": name} for name in get_args(CorrectionName)), GENERATOR | {"correction": "none"}]
)
def test_a_lag_is_taken_with_each_correction_that_is_named(
    schedule: dict[str, Any], algorithm: dict[str, Any], tmp_path: Path
) -> None:
    spec = from_toml(tmp_path, schedule, algorithm)
    assert over_http(schedule, algorithm) == spec
    assert (spec.max_policy_lag, spec.num_open) == (2, 3)
    assert spec.algorithm.correction_name == algorithm["correction"]


def test_a_job_without_a_lag_names_no_correction_and_has_none() -> None:
    spec = job_spec()
    assert (spec.max_policy_lag, spec.num_open) == (0, 1)
    assert (spec.algorithm.correction, spec.algorithm.correction_name) == (None, "none")


def test_the_longest_lag_of_a_job_is_that_of_its_last_iteration_under_version_0() -> None:
    spec = job_spec(iterations=4, schedule="delayed", max_policy_lag=3, algorithm__correction="tis")
    assert spec.schedule_rule.versions_of(3) == (0, 0)


def test_a_resume_to_no_more_iterations_than_the_lag_is_bad_input_and_no_crash() -> None:
    spec = job_spec(iterations=4, schedule="delayed", max_policy_lag=2, algorithm__correction="tis")
    assert resumed_spec(spec, ResumeRequest(iterations=3)).iterations == 3
    with refusal_of("max_policy_lag", match="2 is too large"):
        resumed_spec(spec, ResumeRequest(iterations=2))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rollout__batches_per_iteration": 4000}, "or lower evaluation.num_prompts, or lower max_policy_lag"),
        ({"rollout__batches_per_iteration": 1000, "rollout__max_prompt_tokens": 2**15}, "198,180,864 prompt tokens"),
        ({"rollout__batches_per_iteration": 3000, "rollout__group_size": 64}, "which is 3, make 1,152,000 completions"),
    ],
)
def test_what_the_open_iterations_hold_together_has_the_bound_of_one(changes: dict[str, Any], problem: str) -> None:
    assert job_spec(**changes).num_open == 1
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        judged_spec(**changes, iterations=4, **DELAYED, algorithm__correction="tis")


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_each_schedule_says_which_versions_sample_an_iteration_and_how_many_are_open(name: ScheduleName) -> None:
    lag = 2 if name in LAGGING else 0
    schedule = Schedule(name, lag)
    versions = [schedule.versions_of(iteration) for iteration in range(5)]
    expected = {
        "delayed": [(0, 0), (0, 0), (0, 0), (1, 1), (2, 2)],
        "bounded": [(0, 0), (0, 1), (0, 2), (1, 3), (2, 4)],
    }
    assert versions == expected.get(name, [(iteration, iteration) for iteration in range(5)])
    assert (schedule.lags, schedule.num_open, schedule.opened_by(6)) == (lag > 0, lag + 1, 7 + lag)
    assert schedule.takes_at_once == (name not in ("synchronous", "colocated"))


@pytest.mark.parametrize("name", ["delayed", "bounded"])
def test_every_version_of_an_iteration_is_made_before_it_must_be(name: ScheduleName) -> None:
    """The commit that opens an iteration has made the oldest version that may sample it."""
    for lag in range(1, MAX_POLICY_LAG + 1):
        schedule = Schedule(name, lag)
        for committed in range(40):
            oldest, newest = schedule.versions_of(schedule.opened_by(committed))
            assert oldest == committed + 1
            assert newest - oldest <= lag
