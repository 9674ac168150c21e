"""Mini-batches of an iteration: each step is its equation at the weights before it, in any order of arrival (I7)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.learner import Learner, mini_batch_of
from consumer.gradient.statistics import divided_by, iteration_scaling
from consumer.model.policy import Policy
from contracts.rollouts import RolloutBatch
from tests.builders import give_totals, job_spec
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    relative_error,
    taken_gradients,
)
from tests.contract.test_streamed_losses import models
from tests.contract.test_updates import CASES, Gradients, responses_of, step_down
from tests.loss_equations import Equation, advantages, iteration_loss

BATCHES = 5
PARTS: dict[str, Any] = {"mini_batches": BATCHES}


def steps_of(pair: tuple[Policy, Policy], batches: list[RolloutBatch], algorithm: dict[str, Any]) -> list[Gradients]:
    """The gradient of each mini-batch's step; the policy is left where the last one was computed."""
    policy, reference = pair
    spec = job_spec(algorithm=algorithm | PARTS, rollout__batches_per_iteration=BATCHES)
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=BATCHES)
    learner = Learner(
        spec=spec,
        policy=policy,
        optimizer=cast(Any, None),
        accumulator=accumulator,
        reference=reference.model if spec.algorithm.kl_coefficient else None,
    )
    stats = [learner.train(batch).stats for batch in batches]
    scaling = iteration_scaling(stats, spec.algorithm)
    steps: list[Gradients] = []
    for part in range(BATCHES):
        if part:
            step_down(policy, steps[-1])
            again = list(learner.train_again(lambda: None, part))
            assert len(again) <= 1
        of_part = [one for one in stats if mini_batch_of(one.batch_id, spec) == part]
        give_totals(accumulator, replace(scaling, count=divided_by(of_part, spec.algorithm)).divisor)
        steps.append(taken_gradients(policy))
    return steps


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_the_equation_of_its_part_at_the_moved_weights(tmp_path: Path, case: str) -> None:
    """Advantages are those of the whole iteration, and pi_old is the policy before its first step."""
    algorithm, equation = CASES[case][0], Equation(**CASES[case][1])
    pair, batches = models(tmp_path, float64=True), iteration_of()
    before = responses_of(pair, batches)
    gains = advantages(before, equation)
    given = replace(equation, advantage="given", beta=0.0 if equation.kl_in_reward else equation.beta)
    steps = steps_of(models(tmp_path, float64=True), batches, algorithm)
    for part, gradients in enumerate(steps):
        if part:
            step_down(pair[0], steps[part - 1])
        now = [
            replace(moved, old_logprobs=old.logprobs.detach(), reward=gain)
            for moved, old, gain in zip(responses_of(pair, batches), before, gains, strict=True)
        ]
        iteration_loss([one for one in now if one.batch == part], given).backward()
        expected = taken_gradients(pair[0])
        assert relative_error(gradients, expected) < 1e-8 or not any(one.any() for one in expected.values())


def test_arrival_orders_give_the_same_bits_in_every_step(tmp_path: Path) -> None:
    algorithm, batches = CASES["reinforce++_baseline, KL in the reward"][0], iteration_of()

    def gradients_of(batches: list[RolloutBatch]) -> Gradients:
        steps = steps_of(models(tmp_path, float64=False), batches, algorithm)
        return {f"{name}, step {number}": of for number, step in enumerate(steps) for name, of in step.items()}

    assert_same_bits_in_any_order(gradients_of, batches, orders=3)


def test_parts_are_equal_and_in_the_order_of_the_numbers() -> None:
    spec = job_spec(algorithm__mini_batches=3, rollout__batches_per_iteration=6)
    assert [mini_batch_of(f"7/train/{number}", spec) for number in range(6)] == [0, 0, 1, 1, 2, 2]
    assert mini_batch_of("7/train/5", job_spec()) == 0
