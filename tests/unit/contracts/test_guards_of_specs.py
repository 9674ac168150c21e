"""What a spec refuses beyond the range of a field: combinations that have no meaning or no effect."""

from __future__ import annotations

from typing import Any

import pytest

from contracts.encoding.wire import Record, convert
from contracts.errors import ContractViolation, InvalidInput
from contracts.jobs import JobState
from contracts.rewards import ExactReward, Scored, with_on_unscorable
from contracts.settings import settings_from
from contracts.spec.job import JobSpec
from tests.builders import job_spec
from tests.refusals import refusal_of
from tests.trajectories import ENVIRONMENT

ADAPTERS: dict[str, Any] = {"trainer__lora": {"publish": "adapter"}}
AS_SAMPLED = {"trainer__packing": "as_sampled"}
FSDP: dict[str, Any] = {"trainer__sharding": "fsdp", "trainer__world_size": 2}
KL: dict[str, Any] = {"algorithm__kl_coefficient": 0.1, "algorithm__kl_placement": "reward"}
FLOAT: dict[str, Any] = {"deterministic": False, "trainer__accumulation": "float"}
ALONE: dict[str, Any] = {"rollout__group_size": 1, "algorithm__advantage": "gae"}
PLAYED: dict[str, Any] = {"environment": ENVIRONMENT}
BY_TURN: dict[str, Any] = {"algorithm__credit": "turn"}
GIVEN: dict[str, Any] = {"algorithm__loss": "sft", "algorithm__advantage": "none", "rollout__group_size": 1}
RESAMPLES: dict[str, Any] = {"rollout__max_resamples": 1}
CRITIC: dict[str, Any] = {"algorithm__advantage": "gae"}
SYNCED: dict[str, Any] = {"algorithm__kl_coefficient": 0.1, "algorithm__ref_model_sync_iterations": 2}
CUT: dict[str, Any] = {"algorithm__on_truncated": "penalise"}
REWARDING: dict[str, Any] = {
    "type": "external",
    "name": "variety",
    "inputs": ["text"],
    "outputs": [{"name": "variety", "type": "float32"}],
    "reward_column": "variety",
}
HOSTS: dict[str, Any] = {"trainer__hosts": {"least": 1, "most": 2}, "weights": {"transport": "redis"}}
ROWS: dict[str, Any] = {"type": "jsonl", "train_path": "rows.jsonl"}
CURRICULUM: dict[str, Any] = {"column": "level", "iterations": 10}
HELD: dict[str, Any] = {"name": "more", "dataset": ROWS, "num_prompts": 4}
JUDGE: dict[str, Any] = {"type": "llm_judge", "model": "judge", "prompt": "{completion}"}
LONG: dict[str, Any] = {
    "rollout__max_prompt_tokens": 2**20,
    "rollout__prompts_per_batch": 32,
    "rollout__batches_per_iteration": 1,
}
"""As many prompt tokens as a batch may have."""
TEACHER: dict[str, Any] = {"type": "teacher", "model": "teacher"}
TAUGHT: dict[str, Any] = {"algorithm__distillation_coefficient": 0.5, "stages": [TEACHER]}


FORK: dict[str, Any] = {"fork": {"job": "another", "version": 3}}


def rewarded(**component: Any) -> dict[str, Any]:
    return {"reward__components": [component]}


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidInput) as refusal:
        job_spec(**fields)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"trainer__accumulation": "float"}, 'deterministic needs trainer.accumulation = "exact"'),
        ({"model__cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 has no effect"),
        ({"model__matmul": "onednn", "model__dtype": "bfloat16"}, "matmul has no effect"),
        ({"trainer__kl_alarm": 0.1}, "kl_alarm has no effect with algorithm.kl_coefficient = 0"),
        ({"trainer__stop_on": ["kl_high"]}, "is never said without kl_alarm"),
        ({"optimizer__groups": [{"parameters": ["*"]}]}, "groups has one that changes nothing"),
        *(
            (HOSTS | fields, problem)
            for fields, problem in (
                ({"trainer__hosts": {"least": 3, "most": 2}}, "least = 3 is more than most = 2"),
                ({"trainer__world_size": 2}, "trainer.world_size has no effect with trainer.hosts"),
                (FLOAT, 'trainer.hosts needs trainer.accumulation = "exact"'),
                ({"weights": {"transport": "file"}}, 'weights.transport = "file" is not possible'),
                ({"schedule": "colocated"}, 'schedule = "colocated" is not possible with trainer.hosts'),
            )
        ),
        *(
            ({"evaluation": {"num_prompts": 0} | fields}, problem)
            for fields, problem in (
                ({"sets": [HELD | {"num_prompts": 0}]}, "num_prompts must be above 0 in a set"),
                ({"sets": [HELD | {"dataset": ROWS | {"curriculum": CURRICULUM}}]}, "dataset.curriculum has no effect"),
                ({"sets": [HELD, HELD]}, "sets name one twice"),
                ({"sets": [HELD | {"name": "held_out"}]}, "sets name one twice"),
                ({"sets": [HELD], "best": "another"}, "best = 'another' is none of sets"),
                ({"sets": [HELD]}, "num_prompts = 0 leaves best no score"),
            )
        ),
        ({"stages": [{"type": "teacher"}]}, "stage teacher needs a model, or models by source"),
        ({"stages": [TEACHER | {"top_k": 2, "hidden_size": 2}]}, "has the whole vocabulary; leave top_k out"),
        ({"stages": [JUDGE | {"criteria": {"right": 1.0}}]}, 'keys of a JSON object; set answer = "json"'),
        (ADAPTERS | {"weights": {"transport": "delta"}}, "leaves deltas nothing to save"),
        (ADAPTERS | {"weights": {"transport": "object", "snapshot_every_versions": 2}}, "leaves deltas nothing to"),
        (FORK | {"trainer__external": True}, "fork is not possible with trainer.external = true"),
        (FORK | {"stages": [{"type": "reference"}]}, 'fork is not possible with a stage of type "reference"'),
        ({"rollout__sampling__temperature": 0.0}, "temperature must be above 0"),
        ({"trackers": ["wandb", "wandb"]}, "trackers names one twice"),
        ({"tags": ["seeds", "seeds"]}, "tags names one twice"),
        ({"rollout__group_size": 1}, 'leaves algorithm.advantage = "grpo" nothing to compare'),
        ({"rollout__group_size": 1, "algorithm__advantage": "rloo"}, 'set algorithm.advantage = "gae"'),
        (ALONE | {"algorithm__shuffle_rewards": True}, "shuffle_rewards has no effect with rollout.group_size = 1"),
        *(
            (RESAMPLES | {"algorithm__advantage": name}, f'advantage = "{name}" equal rewards have an advantage')
            for name in ("gdpo", "gae")
        ),
        (RESAMPLES | KL, "the KL makes their rewards differ"),
        (CRITIC | {"trainer__lora": {"rank": 4}}, "trains a whole model, its critic, and trainer.lora none"),
        (CRITIC | FSDP, 'algorithm.advantage = "gae" needs trainer.sharding = "none"'),
        (FLOAT | {"trainer__wider_sums": [{"first_iteration": 0, "bits": 1}]}, "wider_sums has no effect"),
        (
            {"trainer__wider_sums": [{"first_iteration": 3, "bits": 1}, {"first_iteration": 3, "bits": 2}]},
            "wider_sums must be in ascending order",
        ),
        ({"optimizer__schedule": "wsd"}, 'schedule = "wsd" needs decay_iterations'),
        ({"optimizer": {"schedule": "cosine", "decay_iterations": 3}}, "no other schedule takes them"),
        ({"optimizer__min_learning_rate": 1e-8}, "min_learning_rate has no effect"),
        ({"optimizer": {"schedule": "linear", "min_learning_rate": 1e-3}}, "is not below learning_rate"),
        (SYNCED | {"algorithm__kl_coefficient": 0.0}, "without a reference"),
        (SYNCED | {"trainer__lora": {"rank": 2}}, "not possible with trainer.lora"),
        (SYNCED | {"stages": [{"type": "reference"}]}, 'not possible with a stage of type "reference"'),
        ({"algorithm__mini_batches": 3}, "mini_batches = 3 can't cut rollout.batches_per_iteration = 4 into"),
        (BY_TURN, "has no effect where a completion is one turn"),
        (BY_TURN | {"environment": ENVIRONMENT | {"max_turns": 1}}, "has no effect where a completion is one turn"),
        (BY_TURN | RESAMPLES | {"environment": ENVIRONMENT}, "trajectories of equal rewards may have unequal turns"),
        (
            BY_TURN | {"algorithm__advantage": "reinforce++_baseline"},
            'the turns of a group, which advantage = "reinforce++_baseline"',
        ),
        (BY_TURN | TAUGHT | {"algorithm__advantage": "none"}, "compares the turns of a group"),
        (BY_TURN | {"algorithm__loss": {"type": "plugin", "entry_point": "mine"}}, "takes one a response"),
        (BY_TURN | {"algorithm__shuffle_rewards": True}, "would still teach"),
        (BY_TURN | KL, "which is no turn's"),
        (TAUGHT | RESAMPLES, "the teacher judges every completion"),
        ({"environment": ENVIRONMENT | {"max_tokens": 4}}, "environment.max_tokens = 4 has no room for one turn"),
        ({"dataset": {"type": "environment"}}, "takes its tasks from the environment"),
        (PLAYED | {"dataset": {"type": "jsonl", "train_path": "a", "chat": {}}}, "dataset.chat has no effect"),
        ({"environment": ENVIRONMENT | {"renderer": "text", "chat_format": "qwen3"}}, "chat_format has no effect"),
        ({"evaluation__sampling": {"max_new_tokens": 4, "temperature": 0.0}}, "temperature must be above 0"),
        ({"evaluation__sampling": {"max_new_tokens": 6}}, "evaluation.sampling.max_new_tokens is above"),
        ({"evaluation__pass_reward": 0.5}, "pass_reward has no effect with one sample"),
        ({"evaluation__prompts_per_batch": 4096, "evaluation__group_size": 5}, "20,480 completions of an evaluation"),
        ({"trainer__sharding": "fsdp"}, "needs trainer.world_size above 1, or trainer.hosts"),
        (FSDP | FLOAT, 'trainer.sharding = "fsdp" needs trainer.accumulation = "exact"'),
        (FSDP | {"optimizer__type": "adamw_8bit"}, "its blocks would depend on the ranks"),
        (FSDP | {"optimizer__type": "muon"}, "it steps whole matrices"),
        ({"optimizer__type": "muon", "trainer__lora": {}}, "is for whole matrices, of which trainer.lora trains none"),
        (AS_SAMPLED | {"model__dtype": "bfloat16"}, 'packing = "as_sampled" needs model.dtype = "float32"'),
        (AS_SAMPLED | {"deterministic": False}, "needs deterministic = true"),
        (AS_SAMPLED | {"trainer__lora": {}}, "needs no trainer.lora"),
        (AS_SAMPLED | FSDP, 'needs trainer.sharding = "none"'),
        (AS_SAMPLED | {"environment": ENVIRONMENT}, "needs no environment"),
        (AS_SAMPLED | GIVEN, "needs completions that are sampled"),
        ({"trainer__lora": {"target_modules": ["all-linear", "lm_head"]}}, 'names "all-linear" and others'),
        (rewarded(type="length", target_chars=5, max_chars=5), "max_chars must be above target_chars"),
        (rewarded(type="overlong", max_tokens=4, buffer_tokens=5), "buffer_tokens must be max_tokens or less"),
        (rewarded(type="overlong", max_tokens=9, buffer_tokens=4), "overlong begins above 5 tokens"),
        ({"algorithm__truncated_reward": -1.0}, 'no effect without on_truncated = "penalise"'),
        (CUT | TAUGHT | {"algorithm__advantage": "none"}, "which learns from no reward"),
        (CUT | {"stages": [REWARDING]}, "to which a stage would add"),
        (GIVEN | {"algorithm__advantage": "grpo"}, "whatever its reward"),
        (GIVEN | {"algorithm__kl_coefficient": 0.1}, "kl_coefficient has no effect"),
        (GIVEN | {"algorithm__correction": "tis"}, "correction has no effect"),
        (GIVEN | {"algorithm__on_truncated": "mask"}, "on_truncated has no effect"),
        (GIVEN | {"rollout__group_size": 2}, "rollout.group_size = 2 has no effect"),
        (GIVEN | {"rollout__max_resamples": 1}, "rollout.max_resamples has no effect"),
        (GIVEN | {"rollout__sampling__top_p": 0.9}, "rollout.sampling has no effect"),
        ({"rollout__sampling__min_new_tokens": 6}, "min_new_tokens = 6 is above max_new_tokens"),
        ({"rollout__sampling__logit_bias": {"5": float("nan")}}, "expected `float` >= -100.0"),
        (GIVEN | {"schedule": "delayed", "max_policy_lag": 1}, "a lag has no effect"),
        (GIVEN | {"environment": ENVIRONMENT}, "environment has no effect"),
        (GIVEN | {"dataset": {"type": "reasoning_gym", "task": "chain_sum"}}, "gives no completions to learn"),
        (GIVEN | {"reward": {}}, "reward.components needs one or more"),
        (GIVEN | LONG | {"rollout__sampling__max_new_tokens": 1}, "make 33,554,464 prompt tokens of a batch"),
    ],
)
def test_a_combination_without_meaning_is_refused_with_its_fields(fields: dict[str, Any], problem: str) -> None:
    assert problem in refused(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        FLOAT,
        ALONE,
        CRITIC | {"rollout__group_size": 1},
        {"rollout__max_resamples": 16, "algorithm__kl_coefficient": 0.1},
        FSDP,
        FSDP | {"trainer__lora": {}, "optimizer__type": "adamw_8bit"},
        rewarded(type="overlong", max_tokens=8, buffer_tokens=4),
    ],
)
def test_what_has_one_is_taken(fields: dict[str, Any]) -> None:
    assert isinstance(job_spec(**fields), JobSpec)


def test_held_out_prompts_are_sampled_before_after_and_each_n_iterations_where_there_are_any() -> None:
    spec = job_spec(iterations=5, evaluation__num_prompts=4, evaluation__every_iterations=2)
    assert [spec.evaluates(iteration) for iteration in range(6)] == [True, False, True, False, True, True]
    without = job_spec(iterations=5, evaluation__num_prompts=0, evaluation__every_iterations=2)
    assert not any(without.evaluates(iteration) for iteration in range(6))
    assert (spec.last_iteration, without.last_iteration) == (5, 4)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_score_that_is_not_finite_is_an_error(reward: float) -> None:
    with pytest.raises(ContractViolation, match="finite"):
        Scored(reward=reward, breakdown={})


class OfAState(Record, frozen=True, kw_only=True):
    state: JobState


def test_a_word_that_is_none_of_a_kind_is_refused_with_those_that_are() -> None:
    with pytest.raises(InvalidInput, match="succeeded"):
        convert({"state": "paused"}, OfAState)


class StatesInAList(Record, frozen=True, kw_only=True):
    states: tuple[JobState, ...]


def test_a_word_in_a_list_is_refused_with_those_that_there_are() -> None:
    with refusal_of("states[0]") as refusal:
        convert({"states": ["queud"]}, StatesInAList)
    assert (refusal.value.cure or "").startswith("did you mean queued? One of queued, running, ")


def test_a_score_is_stated_for_components_of_the_rubric_alone() -> None:
    rubric = (ExactReward(),)
    assert with_on_unscorable(rubric, {"exact": 0.5}) == (ExactReward(on_unscorable=0.5),)
    with refusal_of("on_unscorable"):
        with_on_unscorable(rubric, {"exact": 0.5, "length": 0.5})


@pytest.mark.parametrize("variable", ["ONBEAT_LOG_FORMAT", "ONBEAT_DEVICE"])
def test_a_setting_that_is_none_of_its_words_is_refused_by_its_variable(variable: str) -> None:
    with pytest.raises(InvalidInput, match=f"{variable}: .* \\(one of "):
        settings_from({variable: "other"})
