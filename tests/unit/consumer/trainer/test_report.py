"""What a run reports: the lines that the trainer reads back, the held-out score, the alarm about log-probs."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from pathlib import Path

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from consumer.gradient.advantages.estimators import batch_rewards
from consumer.gradient.statistics import BatchStats, Mismatch
from consumer.gradient.terms.policy import CLIPPED_HIGH, CLIPPED_LOW
from consumer.model.policy import load_policy
from consumer.trainer.report import RunLog, clipped_noise, in_words, log_iteration, log_run, mismatch_alarm
from contracts.jobs import EvaluationScore, passes_in_words
from contracts.rollouts import PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.datasets import AdditionDataset
from contracts.spec.rollout import EvaluationSet, EvaluationSpec
from contracts.spec.root import SpecRoot
from onbeat.loop.expected import evaluation_score
from tests.builders import batch_of, job_spec, prompt_batch, rollout, rollout_batch, tiny_model_folder
from tests.contract.golden_files import iteration_metrics


def score(version: int, sampled: float) -> EvaluationScore:
    return EvaluationScore(iteration=version, policy_version=version, sampled=sampled, num_prompts=8)


def asked(batch_id: str, *, temperature: float) -> PromptBatch:
    batch = prompt_batch([[5]], batch_id=batch_id, purpose="evaluation", group_size=1)
    return replace(batch, sampling=replace(batch.sampling, temperature=temperature))


def answered(*rewards: float) -> RolloutBatch:
    return batch_of([([5], [rollout([7], reward)]) for reward in rewards])


def test_the_score_is_the_mean_over_the_prompts_that_came_sampled_and_greedy_apart() -> None:
    expected = [asked("a", temperature=1.0), asked("b", temperature=1.0), asked("c", temperature=0.0)]
    arrived = {"a": answered(0.0, 1.0), "b": answered(1.0, 1.0), "c": answered(0.5)}
    whole = evaluation_score(expected, arrived, EvaluationSpec())
    assert whole is not None
    assert (whole.sampled, whole.greedy, whole.num_prompts) == (0.75, 0.5, 4)
    abandoned = evaluation_score(expected, {"b": arrived["b"]}, EvaluationSpec())
    assert abandoned is not None
    assert (abandoned.sampled, abandoned.greedy, abandoned.num_prompts) == (1.0, None, 2)
    assert evaluation_score(expected, {"c": arrived["c"]}, EvaluationSpec()) is None
    assert evaluation_score([], {}, EvaluationSpec()) is None


def test_several_samples_a_prompt_have_a_mean_with_its_error_and_pass_at_k() -> None:
    """c = 2, 1 and 0 of n = 4 samples pass: pass@2 is 1 - 1/6, 1 - 3/6 and 0."""
    groups = [(1.0, 1.0, 0.5, 0.0), (2.0, 0.0, 0.0, 0.0), (0.9, 0.0, 0.0, 0.0)]
    batch = batch_of([([5], [rollout([7], reward) for reward in rewards]) for rewards in groups], group_size=4)
    found = evaluation_score([asked("a", temperature=1.0)], {"a": batch}, EvaluationSpec(group_size=4))
    assert found is not None
    assert found.pass_at is not UNSET
    means = [2.5 / 4, 0.5, 0.9 / 4]
    assert found.sampled == pytest.approx(statistics.fmean(means))
    assert found.sampled_error == pytest.approx(statistics.stdev(means) / math.sqrt(3))
    assert [one.k for one in found.pass_at] == [1, 2, 4]
    shares = [[0.5, 0.25, 0.0], [5 / 6, 0.5, 0.0], [1.0, 1.0, 0.0]]
    assert [one.share for one in found.pass_at] == pytest.approx([statistics.fmean(one) for one in shares])
    assert [one.error for one in found.pass_at] == pytest.approx([statistics.stdev(s) / math.sqrt(3) for s in shares])
    easier = evaluation_score(
        [asked("a", temperature=1.0)], {"a": batch}, EvaluationSpec(group_size=4, pass_reward=0.9)
    )
    assert easier is not None
    assert passes_in_words(easier).startswith(", pass@1 0.333 ± 0.083, pass@2 0.611")


def test_one_sample_a_prompt_has_a_standard_error_over_the_prompts_and_no_pass_at_k() -> None:
    expected = [asked("a", temperature=1.0), asked("b", temperature=1.0)]
    arrived = {"a": answered(0.0, 1.0, 1.0), "b": answered(0.25)}
    found = evaluation_score(expected, arrived, EvaluationSpec())
    assert found is not None
    assert found.sampled_error == pytest.approx(statistics.stdev([0.0, 1.0, 1.0, 0.25]) / math.sqrt(4), rel=1e-15)
    assert found.pass_at is UNSET
    single = evaluation_score(expected, {"b": arrived["b"]}, EvaluationSpec())
    assert single is not None
    assert single.sampled_error is UNSET, "a single prompt says nothing of the others"


def of_set(batch: PromptBatch, name: str) -> PromptBatch:
    return replace(batch, prompts=tuple(replace(prompt, source=name) for prompt in batch.prompts))


def test_each_set_has_its_scores_and_the_one_that_best_names_stands_for_the_version() -> None:
    """A source of the job's own mixture is none of the sets; a set of which nothing came has no score."""
    sets = [EvaluationSet(name=name, dataset=AdditionDataset()) for name in ("hard", "long")]
    sets[0] = replace(sets[0], group_size=2, pass_reward=0.5)
    own, hard = asked("a", temperature=1.0), of_set(asked("b", temperature=1.0), "hard")
    greedy, long = of_set(asked("c", temperature=0.0), "hard"), of_set(asked("d", temperature=1.0), "long")
    expected = [of_set(own, "sums"), hard, greedy, long]
    two = batch_of([([5], [rollout([7], 0.0), rollout([7], 0.5)])], group_size=2)
    arrived = {"a": answered(1.0, 0.0), "b": two, "c": answered(1.0)}
    spec = EvaluationSpec(sets=tuple(sets))
    found = evaluation_score(expected, arrived, spec)
    assert found is not None
    assert found.sets is not UNSET
    assert (found.sampled, found.greedy, found.num_prompts, [*found.sets]) == (0.5, None, 2, ["hard"])
    of_hard = found.sets["hard"]
    assert (of_hard.sampled, of_hard.greedy, of_hard.num_prompts) == (0.25, 1.0, 1)
    assert [(one.k, one.share) for one in of_hard.pass_at or ()] == [(1, 0.5), (2, 1.0)]
    assert "; hard: sampled 0.25, greedy 1, pass@1 0.500" in passes_in_words(found)
    best = evaluation_score(expected, arrived, replace(spec, best="hard"))
    assert best is not None
    assert best.sets is not UNSET
    assert (best.sampled, best.greedy, best.sets["held_out"].sampled) == (0.25, 1.0, 0.5)
    assert evaluation_score(expected, arrived, replace(spec, best="long")) is None


def stats(k3_sum: float, *, largest: float = 0.5, lag: int = 0) -> BatchStats:
    batch = rollout_batch(iteration=3, policy_version=3 - lag)
    gap = Mismatch(num_tokens=10, k3_sum=k3_sum, largest=largest, rho_sum=10.0, rho_square_sum=20.0)
    return dataclasses.replace(BatchStats.of(batch, batch_rewards(batch)), mismatch=gap)


def test_up_to_the_threshold_nobody_is_told() -> None:
    assert mismatch_alarm([stats(0.1), stats(0.1)], iteration=3, threshold=0.01) is None


def test_above_it_the_alarm_has_the_numbers() -> None:
    alarm = mismatch_alarm([stats(0.1), stats(4.1, largest=2.5)], iteration=3, threshold=0.01)
    assert alarm is not None
    assert (alarm.iteration, alarm.threshold, alarm.mismatch_max) == (3, 0.01, 2.5)
    assert (alarm.mismatch_k3, alarm.effective_sample_share) == (pytest.approx(0.21), 0.5)
    assert in_words(alarm) == (
        "in iteration 3 trainer and generator log-probs differ by a mean K3 of 0.21 a token (alarm above 0.01), "
        "at most by 2.5; effective sample share 0.50"
    )


def test_a_threshold_of_zero_is_an_alarm_at_any_difference_also_of_one_whose_k3_is_lost_in_rounding() -> None:
    assert mismatch_alarm([stats(0.0, largest=0.0)], iteration=0, threshold=0.0) is None
    assert mismatch_alarm([stats(0.0, largest=1e-9)], iteration=0, threshold=0.0) is not None


@pytest.mark.parametrize("k3_sum", [math.inf, math.nan])
def test_a_gap_that_overflows_is_an_alarm(k3_sum: float) -> None:
    assert mismatch_alarm([stats(k3_sum)], iteration=0, threshold=1e9) is not None


def test_a_batch_with_a_lag_is_no_witness_against_the_engines() -> None:
    moved = stats(50.0, largest=9.0, lag=2)
    assert mismatch_alarm([moved, stats(0.1)], iteration=3, threshold=0.01) is None
    assert mismatch_alarm([moved], iteration=3, threshold=0.01) is None
    alarm = mismatch_alarm([moved, stats(2.1, largest=2.5)], iteration=3, threshold=0.01)
    assert alarm is not None
    assert (alarm.mismatch_k3, alarm.mismatch_max) == (pytest.approx(0.21), 2.5)


def test_clips_that_act_on_the_gap_of_two_engines_are_named_with_their_share() -> None:
    algorithm = AlgorithmSpec(loss="gspo", old_policy="generator")
    own = dataclasses.replace(stats(0.1), num_tokens=100, term_sums={CLIPPED_LOW: 5.0, CLIPPED_HIGH: 10.0})
    quiet = dataclasses.replace(own, term_sums={CLIPPED_HIGH: 1.0})
    moved = dataclasses.replace(own, lag=1, term_sums={CLIPPED_LOW: 90.0, CLIPPED_HIGH: 10.0})
    assert clipped_noise([own, quiet, moved], algorithm).startswith(
        "clips of 0.0003 and 0.0004 act on 8% of the tokens that this version has sampled itself"
    )
    for silent in ([quiet], [moved], [quiet, moved], []):
        assert clipped_noise(silent, algorithm) == ""
    assert clipped_noise([own], AlgorithmSpec(loss="gspo", updates_per_iteration=2)) == ""


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_log_of_a_run_begins_with_what_is_trained_of_what_and_with_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_model_folder(tmp_path)
    spec = job_spec(name="sums", iterations=9, seed=4)
    policy = load_policy(spec.model, model_root=SpecRoot(tmp_path), gradient_checkpointing=False)
    caplog.set_level(logging.INFO)
    log_run("job-1", spec, policy, first=3)
    job, model, versions, start = lines_of(caplog)
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    assert job.startswith("job job-1, sums: 9 iterations of ")
    assert "schedule periodic" in job
    assert job.endswith("seed 4")
    assert (
        f"{parameters:,} parameters, {parameters:,} of them trained, float32, on cpu, ranks: 1, threads each: " in model
    )
    assert f"torch {torch.__version__.partition('+')[0]}" in versions
    assert start == "starts at iteration 3 of 9"
    facts = caplog.records[0].__dict__["facts"]
    assert (facts["job"], facts["seed"], facts["parameters"]) == ("job-1", 4, parameters)


def test_an_iteration_and_a_held_out_score_are_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = replace(iteration_metrics(), iteration=7, policy_version=7, reward_mean=0.5, num_tokens=96, wall_s=1.25)
    log_iteration(metrics, 20)
    log_iteration(replace(metrics, reward_mean=5.2e-4, wall_s=0.042), 20)
    run_log = RunLog(RunFolder(tmp_path, "job"), job_spec())
    run_log.evaluation(score(2, 0.75))
    run_log.evaluation(replace(score(2, 0.75), greedy=0.5))
    assert lines_of(caplog) == [
        "iteration 7 of 20: reward 0.5, 96 tokens, 1.250 s, version 8",
        "iteration 7 of 20: reward 0.00052, 96 tokens, 0.042 s, version 8",
        "version 2, 8 held-out prompts: sampled 0.75",
        "version 2, 8 held-out prompts: sampled 0.75, greedy 0.5",
    ]
