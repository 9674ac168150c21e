"""Several updates of one iteration: the first is what one update is, the others are their equations (I7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_step import KeptBatch, train_kept_batch, train_micro_batch
from consumer.gradient.statistics import BatchStats, iteration_scaling
from consumer.gradient.terms.policy import CAN_CLIP, num_clipped
from consumer.model.policy import Policy
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from tests.builders import give_totals, job_spec
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    relative_error,
    taken_gradients,
)
from tests.contract.test_streamed_losses import models, responses_of
from tests.loss_equations import Equation, Response, iteration_loss

NARROW: dict[str, Any] = {"clip_low": 0.02, "clip_high": 0.03}
NARROW_EQUATION: dict[str, Any] = {"eps_low": 0.02, "eps_high": 0.03}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"} | NARROW, {"loss": "grpo"} | NARROW_EQUATION),
    "dapo": ({"loss": "dapo"} | NARROW, {"loss": "dapo"} | NARROW_EQUATION),
    "gspo": (
        {"loss": "gspo", "clip_low": 0.005, "clip_high": 0.006},
        {"loss": "gspo", "eps_low": 0.005, "eps_high": 0.006},
    ),
    "cispo": ({"loss": "cispo"} | NARROW, {"loss": "cispo"} | NARROW_EQUATION),
    "bnpo, old policy is the generator": (
        {"loss": "bnpo", "old_policy": "generator", "clip_low": 0.3, "clip_high": 0.4},
        {"loss": "bnpo", "old_is_generator": True, "eps_low": 0.3, "eps_high": 0.4},
    ),
    "reinforce++_baseline, KL in the reward": (
        {"advantage": "reinforce++_baseline", "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}
        | NARROW,
        {"advantage": "reinforce++_baseline", "beta": 0.1, "kl": "k1", "kl_in_reward": True} | NARROW_EQUATION,
    ),
    "KL in the loss and entropy": (
        {"kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.02} | NARROW,
        {"beta": 0.1, "kl": "k2", "alpha": 0.02} | NARROW_EQUATION,
    ),
    "KL weighed, as where nothing is said": ({"kl_coefficient": 0.1} | NARROW, {"beta": 0.1} | NARROW_EQUATION),
    "KL unweighed, as said": (
        {"kl_coefficient": 0.1, "use_bias_correction_kl": False} | NARROW,
        {"beta": 0.1, "weighs_kl": False} | NARROW_EQUATION,
    ),
    "tis by token": ({"correction": "tis"} | NARROW, {"correction": "tis", "w_high": 2.0} | NARROW_EQUATION),
}
Gradients = dict[str, Tensor]
Trained = tuple[list[BatchStats], list[KeptBatch | None]]


def first_update(
    pair: tuple[Policy, Policy], batches: list[RolloutBatch], spec: JobSpec, accumulator: ExactAccumulator
) -> Trained:
    policy, reference = pair
    frozen = reference.model if spec.algorithm.kl_coefficient else None
    trained = [
        train_micro_batch(policy, batch, reference=frozen, spec=spec, accumulator=accumulator) for batch in batches
    ]
    return [stats for stats, _ in trained], [kept for _, kept in trained]


def later_update(policy: Policy, trained: Trained, spec: JobSpec, accumulator: ExactAccumulator) -> list:
    return [
        train_kept_batch(policy, kept, spec=spec, accumulator=accumulator) if kept else stats
        for stats, kept in zip(*trained, strict=True)
    ]


def total(policy: Policy, stats: list[BatchStats], spec: JobSpec, accumulator: ExactAccumulator) -> Gradients:
    give_totals(accumulator, iteration_scaling(stats, spec.algorithm).divisor)
    return taken_gradients(policy)


def step_down(policy: Policy, gradients: Gradients) -> None:
    """Takes a plain step, so large that ratios leave the clip range."""
    with torch.no_grad():
        for name, parameter in policy.trained_parameters().items():
            parameter.sub_(0.02 * gradients[name].sign())


def two_updates(
    pair: tuple[Policy, Policy], batches: list[RolloutBatch], algorithm: dict[str, Any], **changes: Any
) -> tuple[Gradients, Gradients, list[BatchStats]]:
    """Gradients of both updates, and the second's numbers; the policy is left where the second was computed."""
    policy, spec = pair[0], job_spec(algorithm=algorithm | {"updates_per_iteration": 2}, **changes)
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=len(batches))
    trained = first_update(pair, batches, spec, accumulator)
    first = total(policy, trained[0], spec, accumulator)
    step_down(policy, first)
    again = later_update(policy, trained, spec, accumulator)
    return first, total(policy, again, spec, accumulator), again


def moved_from(before: list[Response], now: list[Response]) -> list[Response]:
    """Those of now, against the policy of before."""
    return [replace(one, old_logprobs=old.logprobs.detach()) for one, old in zip(now, before, strict=True)]


def gradient_of_responses(
    pair: tuple[Policy, Policy], responses: list[Response], equation: dict[str, Any]
) -> Gradients:
    """By the equation, written out."""
    taken_gradients(pair[0])
    iteration_loss(responses, Equation(**equation)).backward()
    return taken_gradients(pair[0])


@pytest.mark.parametrize("case", CASES)
def test_an_update_against_kept_log_probs_of_the_same_weights_is_the_streamed_one(tmp_path: Path, case: str) -> None:
    """One update an iteration doesn't compute pi_old, and saves that pass alone: every bit is the same."""
    pair, batches = models(tmp_path, float64=False), iteration_of()
    policy, spec = pair[0], job_spec(algorithm=CASES[case][0])
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=len(batches))
    stats, kept = first_update(pair, batches, spec, accumulator)
    streamed = total(policy, stats, spec, accumulator)
    explicit = [with_explicit_pass(policy, of_batch) for of_batch in kept]
    again = later_update(policy, (stats, explicit), spec, accumulator)
    # Everything else is equal: the first update's ratio is 1 by definition, the later one's because no weight moved.
    assert again == [with_ratios(of_batch) for of_batch in stats]
    gradients = total(policy, again, spec, accumulator)
    assert any(gradient.abs().max() > 0 for gradient in gradients.values())
    assert all(torch.equal(gradients[name], streamed[name]) for name in streamed)


def with_ratios(stats: BatchStats) -> BatchStats:
    """The numbers of a batch whose ratio isn't 1 by definition: each of its passes counts as one that can clip."""
    if not stats.term_sums:
        return stats
    return replace(stats, term_sums=stats.term_sums | {CAN_CLIP: 1.0})


def with_explicit_pass(policy: Policy, kept: KeptBatch | None) -> KeptBatch | None:
    """pi_old by a pass of its own, without gradient, in place of the one that was kept."""
    if kept is None:
        return None
    (only,) = kept.passes
    with torch.no_grad():
        old_logprobs = response_logprobs(policy.model, only.micro_batch, 1.0)
    assert torch.equal(old_logprobs, only.old_logprobs)
    return replace(kept, passes=(replace(only, old_logprobs=old_logprobs),))


@pytest.mark.parametrize("case", CASES)
def test_the_second_update_is_its_equation_at_the_moved_weights(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair, batches = models(tmp_path, float64=True), iteration_of()
    before = responses_of(pair, batches)
    _, gradients, stats = two_updates(pair, batches, algorithm)
    moved = moved_from(before, responses_of(pair, batches))
    assert relative_error(gradients, gradient_of_responses(pair, moved, equation)) < 1e-8
    clipped = sum(num_clipped(of_batch.term_sums) for of_batch in stats)
    assert 0 < clipped < sum(of_batch.num_tokens for of_batch in stats)


def test_arrival_orders_give_the_same_bits_in_every_update(tmp_path: Path) -> None:
    algorithm, batches = CASES["reinforce++_baseline, KL in the reward"][0], iteration_of()

    def gradients_of(batches: list[RolloutBatch]) -> Gradients:
        first, second, _ = two_updates(models(tmp_path, float64=False), batches, algorithm)
        return first | {f"{name}, second update": gradient for name, gradient in second.items()}

    assert_same_bits_in_any_order(gradients_of, batches, orders=4)


def test_a_batch_in_which_nothing_teaches_is_not_kept(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=False), iteration_of()
    accumulator = ExactAccumulator(pair[0].trained_parameters(), max_micro_batches=len(batches))
    _, kept = first_update(pair, batches, job_spec(), accumulator)
    assert [of_batch is None for of_batch in kept] == [True, False, False, False, False]
