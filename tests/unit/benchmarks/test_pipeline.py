"""What a benchmark reads off a timeline: bounds, idle shares, and the seconds in which nothing computes."""

from __future__ import annotations

import pytest

from benchmarks._pipeline import Run, measure
from contracts.events import IterationMetrics, TimelineSpan

PERIOD_S = 10.0
NUM_TOKENS = 100


def run_of(schedule: str, *, generated_at_s: float) -> Run:
    """Three iterations, ten seconds apart, of two batches that take 2 s to sample and 2 s to train.

    generated_at_s: when an iteration's generation begins, from the trainer's turn to it on.
    """
    spans: list[TimelineSpan] = []
    for iteration in range(3):
        start_s = iteration * PERIOD_S
        for number in range(2):
            batch = f"{iteration}/train/{number}"
            sampled_s = start_s + generated_at_s + 2 * number
            trained_s = start_s + 2 + 2 * number
            spans.append(_span("generate", iteration, batch, sampled_s, sampled_s + 2))
            spans.append(_span("score", iteration, batch, sampled_s + 2, sampled_s + 2))
            spans.append(_span("train", iteration, batch, trained_s, trained_s + 2))
        spans.append(_span("step", iteration, "", start_s + 6, start_s + 6.5))
    metrics = [_metrics(iteration) for iteration in range(3)]
    return Run(schedule=schedule, num_generators=1, metrics=metrics, spans=spans)


def _span(what: str, iteration: int, batch_id: str, started_s: float, ended_s: float) -> TimelineSpan:
    who = "generator" if what in ("generate", "score") else "trainer"
    return TimelineSpan(
        who=who, what=what, iteration=iteration, batch_id=batch_id, started_s=started_s, ended_s=ended_s
    )


def _metrics(iteration: int) -> IterationMetrics:
    """The version is announced 7 s after the trainer turned to the iteration."""
    return IterationMetrics(
        iteration=iteration,
        policy_version=iteration,
        trainer_epoch=1,
        num_batches=2,
        num_completions=2,
        num_tokens=NUM_TOKENS,
        reward_mean=0.0,
        reward_std=0.0,
        reward_components={},
        zero_advantage_share=0.0,
        response_tokens_mean=1.0,
        response_tokens_max=1,
        truncated_share=0.0,
        loss=0.0,
        clip_share=0.0,
        kl_to_reference=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        mismatch_k3=0.0,
        mismatch_max=0.0,
        effective_sample_share=1.0,
        started_s=iteration * PERIOD_S,
        wall_s=7.0,
        generation_s=4.0,
        training_s=4.0,
        waiting_s=0.0,
        step_s=0.5,
        publish_s=0.5,
        tokens_per_s=1.0,
    )


def test_a_periodic_iteration_is_bound_by_its_slower_side_and_the_gap_between_two_iterations() -> None:
    found = measure(run_of("periodic", generated_at_s=0.0), range(1, 2))
    assert found.sync_s == pytest.approx(4.0), "from the last pass, at 16, to the next generation, at 20"
    assert (found.first_s, found.last_s) == (pytest.approx(2.0), pytest.approx(2.0))
    assert found.bound_s == pytest.approx(4.0 + max(4.0 + 2.0, 2.0 + 4.0))
    assert found.bound_reached == pytest.approx(1.0)


def test_a_synchronous_iteration_is_bound_by_the_sum() -> None:
    found = measure(run_of("synchronous", generated_at_s=0.0), range(1, 2))
    assert found.bound_s == pytest.approx(4.0 + 4.0 + 4.0)


def test_a_lagging_iteration_is_bound_by_its_busier_side_alone() -> None:
    found = measure(run_of("delayed", generated_at_s=-PERIOD_S + 1.0), range(1, 2))
    assert found.sync_s == 0.0
    assert found.bound_s == pytest.approx(4.5), "4 s of generation, 4 s of passes and 0.5 s of the step"
    assert found.bound_reached == pytest.approx(0.45)


def test_idle_shares_and_throughput_are_those_of_the_time_between_two_announcements() -> None:
    found = measure(run_of("periodic", generated_at_s=0.0), range(1, 2))
    assert found.iteration_s == pytest.approx(PERIOD_S)
    assert found.tokens_per_s == pytest.approx(NUM_TOKENS / PERIOD_S)
    assert found.generator_idle_share == pytest.approx(0.6)
    assert found.trainer_idle_share == pytest.approx(0.55)
    assert found.exposed_sync_s == pytest.approx(4.0), "nothing is sampled or trained from 7 to 10 and from 16 to 17"
    assert found.whole_s == pytest.approx(27.0)
