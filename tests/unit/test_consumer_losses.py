"""GRPO and k3, by hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch

from consumer.losses.grpo import grpo_loss
from consumer.losses.kl import k3

MASK = torch.tensor([[True, True], [True, False]])


def test_on_policy_the_loss_is_minus_the_advantages_and_its_gradient_that_of_a_log_pi() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]], requires_grad=True)
    loss = grpo_loss(logprobs, advantages=torch.tensor([2.0, -0.5]), loss_mask=MASK, clip_low=0.2, clip_high=0.2)
    loss.loss_sum.backward()
    assert loss.loss_sum.item() == pytest.approx(-2.0 + 0.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, -1.0], [0.5, 0.0]]
    assert (loss.num_clipped, loss.k3_sum) == (0, 0.0)


def test_off_policy_tokens_are_clipped_on_the_pessimistic_side() -> None:
    old = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    ratio = torch.tensor([[1.5, 0.5], [0.5, 1.0]])
    loss = grpo_loss(
        old + ratio.log(),
        advantages=torch.tensor([1.0, -1.0]),
        loss_mask=MASK,
        clip_low=0.2,
        clip_high=0.3,
        old_logprobs=old,
    )
    # Row 0: min(1.5, 1.3) and min(0.5, 0.8); row 1: min(-0.5, -0.8).
    assert loss.loss_sum.item() == pytest.approx(-(1.3 + 0.5) / 2 + 0.8)
    assert loss.num_clipped == 3


def test_the_kl_term_adds_k3_per_token() -> None:
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    reference = torch.tensor([[-1.5, -2.0], [-2.0, 50.0]])
    loss = grpo_loss(
        logprobs,
        advantages=torch.zeros(2),
        loss_mask=MASK,
        clip_low=0.2,
        clip_high=0.2,
        reference_logprobs=reference,
        kl_coefficient=0.1,
    )
    first, second = math.exp(-0.5) + 0.5 - 1.0, math.e - 1.0 - 1.0
    assert loss.loss_sum.item() == pytest.approx(0.1 * (first / 2 + second), rel=1e-6)
    assert loss.k3_sum == pytest.approx(first + second, rel=1e-6)


def test_k3_is_zero_where_the_models_agree_and_positive_elsewhere() -> None:
    logprobs = torch.linspace(-4.0, 0.0, 9)
    assert k3(logprobs, logprobs).tolist() == [0.0] * 9
    assert (k3(logprobs, logprobs + 0.5) > 0).all()
    assert (k3(logprobs, logprobs - 0.5) > 0).all()
