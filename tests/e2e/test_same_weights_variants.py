"""What a job may do beside one plain step an iteration keeps the promise of test_same_weights.py (I7)."""

from __future__ import annotations

import signal

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore, JobState
from contracts.run_folder import RunFolder
from tests.builders import CHANGED_LOGITS
from tests.building.specs import trained_job
from tests.chaos.short_job import long_variant
from tests.pipeline import Pipeline

NUM_GENERATORS = 1

ITERATIONS = 3
LORA: dict[str, object] = {"algorithm__kl_coefficient": 0.01, "optimizer__learning_rate": 2e-3}
POOLS = {"easy_threshold": 0.75, "hard_threshold": 0.25, "easy_fraction": 0.25, "hard_fraction": 0.25}
MEASURED = {"type": "addition", "difficulty_pools": POOLS}
ALL = {"name": "all", "weight": 3, "dataset": MEASURED}
EASY_ROWS = {
    "type": "jsonl",
    "train_path": "tests/e2e/easy_sums.jsonl",
    "columns": {"prompt": "sum", "reference": "answers.reversed"},
}
EASY = {"name": "easy", "dataset": EASY_ROWS | {"curriculum": {"column": "level", "iterations": 3, "begins_with": 0.2}}}
VARIANTS: dict[str, dict[str, object]] = {
    "gdpo, updates of a mixture": {
        "optimizer__type": "muon",
        "algorithm__advantage": "gdpo",
        "algorithm__reward_clip": 0.9,
        "algorithm__updates_per_iteration": 3,
        "algorithm__clip_low": 0.01,
        "algorithm__clip_high": 0.01,
        "dataset": {"type": "mixture", "sources": [ALL, EASY]},
        "rollout__sampling__stop": ["9", "00"],
        "reward__components": [{"type": "exact"}, {"type": "numeric", "weight": 0.5, "sources": ["easy"]}],
    },
    "mini-batches": {
        "optimizer__groups": [{"parameters": ["*embed*"], "learning_rate_factor": 0.5, "weight_decay": 0.1}],
        "algorithm__mini_batches": 4,
        "algorithm__kl_coefficient": 0.01,
        "algorithm__ref_model_sync_iterations": 1,
        "algorithm__ref_model_mixup_alpha": 0.6,
        "rollout__sampling__max_new_tokens": 3,
        "algorithm__on_truncated": "penalise",
        "algorithm__truncated_reward": -1.0,
    },
    "SFT in mini-batches": {
        "algorithm": {"loss": "sft", "advantage": "none", "mini_batches": 2},
        "rollout__group_size": 1,
        "trainer__lora": {"rank": 4},
        "reward": {},
    },
    "LoRA": LORA | {"trainer__lora": {"rank": 4, "publish": "adapter"}},
    "top-p, what is cut is masked, changed logits": {
        "rollout__sampling": CHANGED_LOGITS | {"max_new_tokens": 3, "top_p": 0.9},
        "algorithm__on_truncated": "mask",
        "algorithm__old_policy": "generator",
        "algorithm__kl_coefficient": 0.01,
    },
    "lite_ppo": {
        "algorithm__advantage": "lite_ppo",
        "algorithm__loss": "dapo",
        "algorithm__reward_clip": 0.9,
        "evaluation": {
            "num_prompts": 8,
            "every_iterations": 2,
            "best": "easy",
            "sets": [
                {"name": "easy", "dataset": EASY_ROWS, "num_prompts": 6, "group_size": 4, "greedy": False},
                {"name": "cool", "dataset": {"type": "addition"}, "sampling": CHANGED_LOGITS | {"max_new_tokens": 4}},
            ],
        },
    },
    "PPO in mini-batches, by oneDNN": {
        "model__matmul": "onednn",
        "algorithm": {
            "advantage": "gae",
            "mini_batches": 2,
            "updates_per_iteration": 2,
            "value_clip": 0.2,
            "kl_coefficient": 0.01,
            "kl_placement": "reward",
        },
        "rollout__group_size": 1,
        "optimizer__groups": [{"parameters": ["critic.*"], "learning_rate_factor": 3.0}],
    },
    "REINFORCE++, a float32 head": {
        "model": {"path": "configs/models/two-digit-addition", "dtype": "bfloat16", "cast_lm_head_to_fp32": True},
        "algorithm__advantage": "reinforce++_baseline",
        "algorithm__loss": "dapo",
        "reward__components": [{"type": "exact"}, {"type": "overlong", "max_tokens": 5, "buffer_tokens": 2}],
        "trackers": ["tensorboard"],
    },
}
STEPS_BEFORE_DEATH = {
    "gdpo, updates of a mixture": 3 * (ITERATIONS - 1) + 2,
    "mini-batches": 4 * (ITERATIONS - 1) + 3,
    "SFT in mini-batches": 2 * (ITERATIONS - 1) + 1,
    "PPO in mini-batches, by oneDNN": 4 * (ITERATIONS - 1) + 3,
}
"""ITERATIONS, where a variant isn't named."""
KILLED_BY_CAMPAIGN = {"mini-batches", "SFT in mini-batches", "top-p, what is cut is masked, changed logits"}
"""Variants whose trainer dies in `make chaos` alone: others die between mini-batches, with adapters, at a mask."""


plain_job = trained_job.but(
    iterations=ITERATIONS, rollout__prompts_per_batch=8, optimizer__learning_rate=2e-4, evaluation__num_prompts=0
)
SPECS = {name: plain_job.but(**fields) for name, fields in VARIANTS.items()}


@pytest.fixture(scope="module")
def oracles(pipeline: Pipeline) -> dict[str, str]:
    """Variant → job of the undisturbed synchronous run with one generator."""
    oracles = {name: pipeline.train(SPECS[name](schedule="synchronous")) for name in VARIANTS}
    pipeline.start("producer-2")
    return oracles


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=long_variant if name in KILLED_BY_CAMPAIGN else ()) for name in VARIANTS]
)
def test_a_killed_trainer_and_two_generators_leave_the_weights_of_the_undisturbed_run(
    pipeline: Pipeline, oracles: dict[str, str], variant: str
) -> None:
    """The trainer dies between two steps of its last iteration, where there are several."""
    job_id, _ = pipeline.jobs.create(SPECS[variant]())
    crash_at = f"consumer.after_step:{STEPS_BEFORE_DEATH.get(variant, ITERATIONS)}"
    assert pipeline.train_until_death(job_id, crash_at=crash_at) == -signal.SIGKILL
    pipeline.train_to_the_end(job_id)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.final_digest(job_id) == pipeline.final_digest(oracles[variant])
    assert pipeline.verdict(job_id).gaps == ()
    assert scores_of(pipeline, job_id) == scores_of(pipeline, oracles[variant])
    passes = SPECS[variant]().algorithm.updates_per_iteration
    for record in pipeline.jobs.audit(job_id):
        only_evaluates = record.iteration == ITERATIONS
        assert record.kind == "rewind" or only_evaluates or set(record.in_sums or ()) == {passes}
    if SPECS[variant]().trackers:
        assert tracked_iterations(pipeline, job_id) == list(range(ITERATIONS))


@long_variant
@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("gdpo, updates of a mixture", {}),
        ("lite_ppo", {}),
        ("mini-batches", {"trainer__sharding": "fsdp"}),
        ("LoRA", {"trainer__sharding": "fsdp"}),
        ("LoRA", {"trainer__lora": {"rank": 4, "publish": "merged"}}),
        ("SFT in mini-batches", {}),
    ],
)
def test_two_ranks_leave_the_weights_of_one(
    pipeline: Pipeline, oracles: dict[str, str], variant: str, changes: dict[str, object]
) -> None:
    job_id = pipeline.train(SPECS[variant](trainer__world_size=2, **changes))
    assert pipeline.final_digest(job_id) == pipeline.final_digest(oracles[variant])
    assert pipeline.verdict(job_id).gaps == ()


def tracked_iterations(pipeline: Pipeline, job_id: str) -> list[int]:
    """Steps of the points in TensorBoard, those of the dead trainer and of its successor."""
    events = EventAccumulator(str(RunFolder(pipeline.settings.run_root_path, job_id).path / "tensorboard"))
    events.Reload()
    return [point.step for point in events.Scalars("reward_mean")]


def test_an_iteration_says_what_it_measured(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    for metrics in metrics_of(pipeline, oracles["REINFORCE++, a float32 head"]):
        assert -1.0 <= metrics.reward_components["overlong"] < 0.0
        assert metrics.advantage_mean == pytest.approx(0.0, abs=1e-9)
        assert metrics.advantage_std == pytest.approx(1.0, abs=1e-3)
        assert metrics.entropy > 0.0
        assert metrics.trained_tokens > 0, "of the groups whose rewards differ alone"
        assert metrics.trained_tokens_per_s > 0.0
        assert metrics.mfu is None


def test_truncated_sampling_leaves_no_gap_to_the_generator(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    for metrics in metrics_of(pipeline, oracles["top-p, what is cut is masked, changed logits"]):
        assert 0.0 < metrics.mismatch_max < 1e-4
        assert 0.0 < metrics.truncated_share < 1.0
        assert metrics.entropy > 0.0


def test_merged_weights_and_adapters_through_redis_are_the_same_versions(
    pipeline: Pipeline, oracles: dict[str, str]
) -> None:
    merged = pipeline.train(SPECS["LoRA"](trainer__lora={"rank": 4, "publish": "merged"}))
    by_redis = pipeline.train(SPECS["LoRA"](weights={"transport": "redis"}))
    for job_id in (merged, by_redis):
        assert pipeline.final_digest(job_id) == pipeline.final_digest(oracles["LoRA"])
        assert pipeline.verdict(job_id).gaps == ()


def test_each_set_of_an_evaluation_has_a_score_and_the_best_is_of_the_set_that_is_named(
    pipeline: Pipeline, oracles: dict[str, str]
) -> None:
    scores = scores_of(pipeline, oracles["lite_ppo"])
    assert [*scores] == [0, 2, ITERATIONS], "every second one, and the last"
    for score in scores.values():
        assert score.sets
        assert (score.num_prompts, score.greedy, [one.k for one in score.pass_at or ()]) == (6, None, [1, 2, 4])
        assert {name: one.num_prompts for name, one in score.sets.items()} == {"held_out": 8, "cool": 64}
        assert all(one.greedy is not None for one in score.sets.values())


def test_what_was_cut_earns_the_stated_reward(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    """A sum of three digits may be right, and cut before its end: its score stays in sight."""
    for metrics in metrics_of(pipeline, oracles["mini-batches"]):
        cut = metrics.truncated_share
        assert 0.0 < cut < 1.0
        assert -cut <= metrics.reward_mean <= metrics.reward_components["exact"] - cut + 1e-9


def test_given_completions_are_learnt_and_nothing_is_sampled(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    """The model was warmed up on these sums: it gives their digits a mean probability of about a half."""
    for metrics in metrics_of(pipeline, oracles["SFT in mini-batches"]):
        assert 0.0 < metrics.loss < 1.0
        assert (metrics.reward_mean, metrics.truncated_share, metrics.mismatch_max) == (0.0, 0.0, 0.0)
        assert metrics.trained_tokens > metrics.num_tokens


def test_only_the_updates_after_the_first_are_clipped(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    for metrics in metrics_of(pipeline, oracles["gdpo, updates of a mixture"]):
        first, *others = metrics.updates
        assert "clip_share" not in first.loss_metrics
        shares = [update.loss_metrics["clip_share"] for update in others]
        assert [share > 0.0 for share in shares] == [True, True]
        assert metrics.loss_metrics["clip_share"] == pytest.approx(sum(shares) / 2)


def test_each_source_of_a_mixture_has_its_rewards_and_its_components(
    pipeline: Pipeline, oracles: dict[str, str]
) -> None:
    """Three of four prompts are sums of two digits; the other reward is of the easy ones alone."""
    for metrics in metrics_of(pipeline, oracles["gdpo, updates of a mixture"]):
        assert metrics.source_rewards
        rewards, exact = metrics.source_rewards, metrics.reward_components["exact"]
        assert set(rewards) == {"all", "easy"}
        assert metrics.reward_mean == pytest.approx(0.75 * rewards["all"] + 0.25 * rewards["easy"])
        assert metrics.reward_mean == pytest.approx(exact + 0.25 * 0.5 * metrics.reward_components["numeric"])


def test_prompts_come_again_by_their_measured_pass_rates(pipeline: Pipeline, oracles: dict[str, str]) -> None:
    """Six of 24 sums are to be easy and six hard ones, which were sampled before."""
    job_id = oracles["gdpo, updates of a mixture"]
    drawn = [record.drawn[0] for record in pipeline.jobs.audit(job_id) if record.drawn]
    seen: set[int] = set()
    for of_iteration, metrics in zip(drawn, metrics_of(pipeline, job_id), strict=True):
        known = min(6, of_iteration.num_easy) + min(6, of_iteration.num_hard)
        assert len(seen & {*of_iteration.places}) >= known
        assert metrics.difficulty_pools == of_iteration.shares
        seen.update(of_iteration.places)
    assert drawn[1].num_easy
    assert drawn[1].num_hard


def test_only_the_first_mini_batch_meets_the_policy_that_sampled_it(
    pipeline: Pipeline, oracles: dict[str, str]
) -> None:
    for metrics in metrics_of(pipeline, oracles["mini-batches"]):
        assert len(metrics.updates) == 4
        assert metrics.updates[0].loss_metrics.get("clip_share", 0.0) == 0.0
        assert metrics.mismatch_max < 1e-4  # of all batches, before the first step
        assert len({update.grad_norm for update in metrics.updates}) == 4


def scores_of(pipeline: Pipeline, job_id: str) -> dict[int, EvaluationScore]:
    """Iteration → the last score of it."""
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    return {score.iteration: score for score in read_json_lines(folder.evaluations, EvaluationScore)}


def metrics_of(pipeline: Pipeline, job_id: str) -> list[IterationMetrics]:
    lines = RunFolder(pipeline.settings.run_root_path, job_id).metrics.read_bytes().splitlines()
    return [decode_json(line, IterationMetrics) for line in lines]
