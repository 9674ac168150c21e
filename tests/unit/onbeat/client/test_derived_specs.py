"""A spec that is made of another: to evaluate a model, to go on from a checkpoint, or as one job of a sweep."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.errors import InvalidInput
from onbeat.client.derived_specs import evaluating, forking, named_after, swept, values_in, varied_keys, without_digests
from onbeat.client.spec_file import parse_spec

TRAINED: dict[str, Any] = {
    "name": "sums",
    "iterations": 50,
    "schedule": "delayed",
    "max_policy_lag": 1,
    "model": {"path": "models/before", "dtype": "bfloat16", "file_digests": {"models/before/config.json": "1" * 64}},
    "dataset": {
        "type": "mixture",
        "sources": [
            {"name": "sums", "dataset": {"type": "addition", "difficulty_pools": {}}},
            {"name": "more", "dataset": {"type": "jsonl", "train_path": "rows.jsonl"}},
        ],
    },
    "reward": {"components": [{"type": "exact"}]},
    "rollout": {"group_size": 16, "max_resamples": 2, "sampling": {"max_new_tokens": 5}},
    "algorithm": {"correction": "tis", "kl_coefficient": 0.1},
    "optimizer": {"learning_rate": 1e-4},
    "trainer": {"lora": {"rank": 4}},
    "evaluation": {"num_prompts": 32, "group_size": 4, "every_iterations": 5, "stop_when": {"patience": 2}},
}


def test_an_evaluation_has_the_prompts_reward_and_sampling_of_the_spec_and_nothing_of_its_training() -> None:
    spec = parse_spec(evaluating(TRAINED, "models/after"))
    assert (spec.name, spec.iterations, spec.schedule) == ("evaluation of sums", 0, "periodic")
    assert (spec.model.path, spec.model.dtype, bool(spec.model.file_digests)) == ("models/after", "bfloat16", False)
    assert (spec.evaluation.num_prompts, spec.evaluation.num_samples) == (32, 4)
    assert (spec.evaluation.every_iterations, bool(spec.evaluation.stop_when)) == (0, False)
    assert spec.rollout.sampling.max_new_tokens == 5
    assert (spec.rollout.max_resamples, spec.algorithm.kl_coefficient, spec.trainer.lora) == (0, 0.0, None)
    assert TRAINED["evaluation"]["stop_when"] == {"patience": 2}, "the spec itself stays as it is"


def test_a_fork_goes_on_from_a_version_and_forgets_digests_of_what_is_changed() -> None:
    values = forking(TRAINED | {"fork": {"job": "job-0", "version": 1}}, job="job-1", version=20, iterations=30)
    assert values["fork"] == {"job": "job-1", "version": 20}
    assert values["iterations"] == 30
    values["dataset"] = {"type": "jsonl", "train_path": "rows.jsonl", "file_digests": {"rows.jsonl": "2" * 64}}
    without_digests(values, ["dataset.train_path=other.jsonl", "optimizer.learning_rate=1e-5"])
    assert "file_digests" not in values["dataset"]
    assert "file_digests" in values["model"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,1e-3", ["1e-4", "1e-3"]),
        ("periodic, synchronous", ["periodic", "synchronous"]),
        ("[1,2],[3]", ["[1,2]", "[3]"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("{ held_out = 0.5, patience = 2 }", ["{ held_out = 0.5, patience = 2 }"]),
        ("7", ["7"]),
    ],
)
def test_values_are_split_at_the_commas_between_them(text: str, values: list[str]) -> None:
    assert values_in(text) == values


def test_a_sweep_has_a_job_for_each_combination() -> None:
    combinations = swept(["iterations=5", "optimizer.learning_rate=1e-4,1e-3", "seed=1,2"])
    assert combinations == [
        ["iterations=5", f"optimizer.learning_rate={rate}", f"seed={seed}"]
        for rate in ("1e-4", "1e-3")
        for seed in (1, 2)
    ]
    assert varied_keys(combinations) == ["optimizer.learning_rate", "seed"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["seed=1"], "--set: gives one job, which is no sweep"),
        ([], "--set: gives one job, which is no sweep"),
        (["seed"], "--set: `seed` is not key.path=value,value"),
        ([f"seed={','.join(map(str, range(13)))}", "name=a,b,c,d,e"], "--set: makes 65 jobs, at most 64 are allowed"),
    ],
)
def test_what_is_no_sweep_is_refused_with_the_cure(settings: list[str], problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        swept(settings)
    assert str(refused.value).startswith(problem)
    assert refused.value.cure


def test_jobs_that_differ_by_their_seeds_alone_have_the_same_tags() -> None:
    tags = []
    for seed in (1, 2):
        values: dict[str, Any] = {"name": "sums", "tags": ["mine"]}
        named_after(values, ["optimizer.learning_rate=1e-4", f"seed={seed}"], tag="sweep-1")
        assert values["name"] == f"sums, learning_rate=1e-4, seed={seed}"
        tags.append(values["tags"])
    assert tags[0] == tags[1] == ["mine", "sweep-1", "learning_rate=1e-4"]
