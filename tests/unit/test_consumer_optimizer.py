"""AdamW, clipping and the learning rate."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from consumer.optimizer import PolicyOptimizer, horizon_at, learning_rate_at
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.spec import OptimizerSpec


def weights(values: list[float]) -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.tensor(values))}


def test_the_learning_rate_warms_up_and_then_decays_to_zero_at_the_end() -> None:
    linear = OptimizerSpec(learning_rate=1.0, schedule="linear", warmup_iterations=2)
    assert [learning_rate_at(iteration, linear, 6) for iteration in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimizerSpec(learning_rate=1.0, schedule="cosine")
    rates = [learning_rate_at(iteration, cosine, 4) for iteration in range(5)]
    assert rates == pytest.approx([1.0, 0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0])
    constant = OptimizerSpec(learning_rate=0.3, warmup_iterations=3)
    assert [learning_rate_at(i, constant, 2) for i in range(2)] == pytest.approx([0.1, 0.2])
    assert learning_rate_at(100, constant, 2) == 0.3


def test_what_was_trained_before_a_resume_changed_the_iterations_keeps_its_learning_rate() -> None:
    horizons = {0: 4, 3: 6}
    assert [horizon_at(iteration, horizons, 6) for iteration in range(6)] == [4, 4, 4, 6, 6, 6]
    assert horizon_at(2, {}, 5) == 5


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    named = weights([1.0, -2.0])
    spec = OptimizerSpec(max_grad_norm=1.0, weight_decay=0.1, beta1=0.9, beta2=0.99, epsilon=1e-8)
    optimizer = PolicyOptimizer(named, spec)
    named["weight"].grad = torch.tensor([3.0, 4.0])
    assert optimizer.step(0.01) == 5.0
    # The first step of Adam is gradient / (|gradient| + eps), after the weight decay.
    expected = [1.0 - 0.01 * 0.1 * 1.0 - 0.01, -2.0 + 0.01 * 0.1 * 2.0 - 0.01]
    assert named["weight"].tolist() == pytest.approx(expected, rel=1e-6)
    assert optimizer.state_tensors()["exp_avg.weight"].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
    assert named["weight"].grad is None


def test_a_gradient_below_the_norm_is_left_as_it_is() -> None:
    named = weights([0.0, 0.0])
    optimizer = PolicyOptimizer(named, OptimizerSpec(max_grad_norm=10.0))
    named["weight"].grad = torch.tensor([3.0, 4.0])
    optimizer.step(0.01)
    assert optimizer.state_tensors()["exp_avg.weight"].tolist() == pytest.approx([0.3, 0.4], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_moves_nothing(bad: float) -> None:
    named = weights([1.0, 2.0])
    optimizer = PolicyOptimizer(named, OptimizerSpec())
    named["weight"].grad = torch.tensor([bad, 0.0])
    with pytest.raises(TrainingDiverged, match="grad_norm"):
        optimizer.step(0.01)
    assert named["weight"].tolist() == [1.0, 2.0]


def test_optimizer_state_of_another_model_is_refused() -> None:
    optimizer = PolicyOptimizer(weights([1.0, 2.0]), OptimizerSpec())
    state = {"exp_avg.weight": torch.zeros(3), "exp_avg_sq.weight": torch.zeros(3), "step.weight": torch.tensor(1.0)}
    with pytest.raises(ContractViolation, match="another shape"):
        optimizer.load_state_tensors(state)
    with pytest.raises(ContractViolation, match="not this model's"):
        optimizer.load_state_tensors({"exp_avg.other": torch.zeros(2)})
