"""A critic beside the policy: the whole loss of PPO, token by token in float64, at both steps of an iteration."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import UNSET, UnsetType
from torch import nn

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.advantages.gae import whitened
from consumer.gradient.log_probs import response_values
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.statistics import Scaling, iteration_numbers
from consumer.gradient.terms.table import terms_of_job
from consumer.gradient.terms.value import RETURNS
from consumer.model.policy import Policy
from contracts.errors import ContractViolation
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec, OptimizerSpec
from contracts.spec.trainer import ParameterGroup
from tests.builders import batch_of, job_spec, rollout, step_on_grads
from tests.contract.test_streamed_gradient import (
    assert_same_bits_in_any_order,
    iteration_of,
    relative_error,
    taken_gradients,
    to_float64,
)
from tests.contract.test_streamed_losses import models, responses_of
from tests.contract.test_updates import Gradients, first_update, later_update, step_down, total
from tests.loss_equations import Equation, iteration_loss

GAE = {"advantage": "gae"}
KL_IN_REWARD = {"loss": "dapo", "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_placement": "reward"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "discounted, over tokens": (
        {"loss": "dapo", "discount": 0.9, "gae_lambda": 0.5, "value_coefficient": 2.0},
        {"loss": "dapo", "gamma": 0.9, "lam": 0.5, "value_weight": 2.0},
    ),
    "unwhitened, between one step and all": (
        {"gae_lambda": 0.95, "whiten_advantages": False},
        {"lam": 0.95, "whitens": False},
    ),
    "whitened with an epsilon of its own": ({"advantage_epsilon": 0.3}, {"delta": 0.3}),
    "one step": ({"gae_lambda": 0.0, "loss": "dr_grpo"}, {"lam": 0.0, "loss": "dr_grpo"}),
    "KL in the reward": (KL_IN_REWARD, {"loss": "dapo", "beta": 0.1, "kl": "k1", "kl_in_reward": True}),
    "KL and entropy in the loss": (
        {"kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.02},
        {"beta": 0.1, "kl": "k2", "alpha": 0.02},
    ),
    "tis": ({"correction": "tis"}, {"correction": "tis", "w_high": 2.0}),
}
CLIPS = {"clip_low": 0.02, "clip_high": 0.03}


def with_critic(policy: Policy) -> Policy:
    """Its head isn't zeros, so that values differ from the first step on."""
    made = policy.with_critic()
    assert made.critic is not None
    head = made.critic.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.5, 0.7, head.weight.numel(), dtype=head.weight.dtype)[None])
        head.bias.fill_(0.2)
    if policy.model.dtype == torch.float64:
        to_float64(replace(policy, model=made.critic))
    return made


def pair_of(folder: Path, *, float64: bool) -> tuple[Policy, Policy]:
    policy, reference = models(folder, float64=float64)
    return with_critic(policy), reference


def spec_of(algorithm: dict[str, Any], **changes: Any) -> JobSpec:
    return job_spec(algorithm=algorithm | GAE, **changes)


def equation_gradient(
    pair: tuple[Policy, Policy], batches: list[RolloutBatch], eq: Equation, before: list
) -> Gradients:
    """Backward once through each token's loss. before: the responses before the iteration's first step."""
    now = [
        replace(one, old_logprobs=old.logprobs.detach(), old_values=old.values.detach())
        for one, old in zip(responses_of(pair, batches), before, strict=True)
    ]
    iteration_loss(now, eq).backward()
    return taken_gradients(pair[0])


def gradients_of(
    pair: tuple[Policy, Policy], batches: list[RolloutBatch], spec: JobSpec
) -> tuple[Gradients, Gradients | None]:
    """Those of the first step, and of the second where there is one, which the policy is left before."""
    policy = pair[0]
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=len(batches))
    trained = first_update(pair, batches, spec, accumulator)
    first = total(policy, trained[0], spec, accumulator)
    if spec.algorithm.updates_per_iteration == 1:
        return first, None
    step_down(policy, first)
    again = later_update(policy, trained, spec, accumulator)
    return first, total(policy, again, spec, accumulator)


@pytest.mark.parametrize("case", CASES)
def test_both_steps_are_the_equation_against_values_and_returns_from_before_the_first(
    tmp_path: Path, case: str
) -> None:
    options, equation = CASES[case]
    spec, batches = spec_of(options | CLIPS | {"value_clip": 0.01, "updates_per_iteration": 2}), iteration_of()
    eq = Equation(**GAE, **equation, eps_low=0.02, eps_high=0.03, value_clip=0.01)
    pair = pair_of(tmp_path, float64=True)
    before = responses_of(pair, batches)
    first, second = gradients_of(pair_of(tmp_path, float64=True), batches, spec)
    expected = equation_gradient(pair, batches, eq, before)
    assert any(name.startswith("critic.") and gradient.abs().max() > 0 for name, gradient in expected.items())
    assert relative_error(first, expected) < 1e-8
    step_down(pair[0], first)
    expected = equation_gradient(pair, batches, eq, before)
    assert second is not None
    assert relative_error(second, expected) < 1e-8
    assert relative_error(equation_gradient(pair, batches, replace(eq, value_clip=math.inf), before), expected) > 1e-4


@pytest.mark.parametrize("changes", [{}, {"trainer__max_tokens_per_micro_batch": 24}, {"trainer__packing": "padded"}])
def test_order_doesnt_change_a_bit_and_cuts_and_packing_change_no_gradient(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    batches = iteration_of()
    plain, _ = gradients_of(pair_of(tmp_path, float64=True), batches, spec_of(KL_IN_REWARD))
    exact, _ = gradients_of(pair_of(tmp_path, float64=True), batches, spec_of(KL_IN_REWARD, **changes))
    assert relative_error(exact, plain) < 1e-8
    pair, spec = pair_of(tmp_path, float64=False), spec_of(KL_IN_REWARD, **changes)
    assert_same_bits_in_any_order(lambda batches: gradients_of(pair, batches, spec)[0], batches, orders=5)


def test_a_critic_begins_with_values_of_zero_and_tells_what_it_explains(tmp_path: Path) -> None:
    policy, reference = models(tmp_path, float64=False)
    pair = policy.with_critic(), reference
    spec, batches = spec_of({"whiten_advantages": False}), iteration_of()
    accumulator = ExactAccumulator(pair[0].trained_parameters(), max_micro_batches=len(batches))
    stats, _ = first_update(pair, batches, spec, accumulator)
    rewards = [one.reward for batch in batches for group in batch.groups for one in group.rollouts]
    assert [advantage for one in stats for advantage in one.advantages] == pytest.approx(rewards)
    numbers = iteration_numbers(stats, scaling=Scaling(count=1), terms=terms_of_job(spec)).loss_metrics
    lengths = [len(response.logprobs) for response in responses_of(pair, batches)]
    squares = sum(reward**2 * length for reward, length in zip(rewards, lengths, strict=True)) / sum(lengths)
    mean = sum(reward * length for reward, length in zip(rewards, lengths, strict=True)) / sum(lengths)
    assert numbers["value_loss"] == pytest.approx(squares / 2.0)
    assert numbers["explained_variance"] == pytest.approx(1.0 - squares / (squares - mean**2))


@pytest.mark.parametrize("max_tokens", [8192, 24])
def test_whitened_advantages_have_mean_0_and_deviation_1_over_each_batch_however_it_is_cut(
    tmp_path: Path, max_tokens: int
) -> None:
    """Each completion has one token, whose advantage is the completion's."""
    pair = pair_of(tmp_path, float64=False)
    spec = spec_of({"advantage_epsilon": 1e-9}, trainer__max_tokens_per_micro_batch=max_tokens)
    for number, rewards in enumerate(((0.0, 1.0, 0.0, 1.0), (7.0, 7.5, 9.0, -3.0))):
        rollouts = [rollout([9 + row], reward, logprobs=[-1.0]) for row, reward in enumerate(rewards)]
        batch = batch_of([([5, 6, 7], rollouts)], batch_id=f"0/train/{number}")
        accumulator = ExactAccumulator(pair[0].trained_parameters(), max_micro_batches=2)
        (stats,), _ = first_update(pair, [batch], spec, accumulator)
        assert statistics.fmean(stats.advantages) == pytest.approx(0.0, abs=1e-12)
        assert statistics.stdev(stats.advantages) == pytest.approx(1.0)
        # The critic still learns the reward, and not what the batch made of it.
        assert stats.term_sums[RETURNS] == pytest.approx(sum(rewards))


def test_equal_advantages_are_whitened_to_nothing_and_not_to_their_rounding() -> None:
    values = [torch.full((2, 2), 0.1, dtype=torch.float64), torch.full((1, 2), 0.1, dtype=torch.float64)]
    masks = [torch.ones((2, 2), dtype=torch.bool), torch.tensor([[True, False]])]
    assert all((one == 0.0).all() for one in whitened(values, masks, epsilon=1e-12))
    assert all((one == 0.0).all() for one in whitened(values[:1], [torch.tensor([[True, False]] * 2)], epsilon=1e-12))


def test_the_values_of_a_critic_in_bfloat16_are_not_rounded_to_its_8_bits(tmp_path: Path) -> None:
    policy = models(tmp_path, float64=False)[0]
    policy = with_critic(replace(policy, model=policy.model.to(torch.bfloat16)))
    assert policy.critic is not None
    head = policy.critic.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    with torch.no_grad():
        head.bias.fill_(10.0)
    batch = iteration_of()[0]
    advantages = np.zeros((len(batch.groups), batch.group_size))
    values = response_values(policy.critic, make_micro_batch(batch, advantages=advantages))
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).any()


@pytest.mark.parametrize(
    ("factor", "of_critic", "of_its_norms"), [(UNSET, 10.0, 5.0), (1.0, 1.0, 0.5)], ids=["left out", "as the policy's"]
)
def test_a_critic_learns_at_ten_times_the_policys_rate_unless_the_spec_says_otherwise(
    tmp_path: Path, factor: float | UnsetType, of_critic: float, of_its_norms: float
) -> None:
    """Adam's first step of a gradient of 1 is the learning rate itself."""
    policy = models(tmp_path, float64=False)[0].with_critic()
    norms = ParameterGroup(parameters=("*norm*",), learning_rate_factor=0.5)
    spec = OptimizerSpec(learning_rate=0.01, critic_learning_rate_factor=factor, groups=(norms,), max_grad_norm=1e9)
    optimizer = PolicyOptimizer(policy.trained_parameters(), spec, critic=policy.critic_parameters())
    before = {name: parameter.detach().clone() for name, parameter in policy.trained_parameters().items()}
    for parameter in optimizer.stepped.values():
        parameter.grad = torch.ones_like(parameter)
    step_on_grads(optimizer, 0.01)
    moved = {name: (before[name] - parameter).mean().item() for name, parameter in policy.trained_parameters().items()}
    assert moved["model.norm.weight"] == pytest.approx(0.005, rel=1e-3)
    assert moved["critic.model.norm.weight"] == pytest.approx(0.01 * of_its_norms, rel=1e-3)
    assert moved["model.embed_tokens.weight"] == pytest.approx(0.01, rel=1e-3)
    assert moved["critic.lm_head.weight"] == pytest.approx(0.01 * of_critic, rel=1e-3)


def test_a_checkpoint_of_the_optimizer_has_the_critic_and_no_other_jobs_is_taken(tmp_path: Path) -> None:
    def optimizer_of(policy: Policy) -> PolicyOptimizer:
        return PolicyOptimizer(
            policy.trained_parameters(),
            OptimizerSpec(learning_rate=0.01),
            embeddings=policy.embedding_names(),
            heads=policy.head_names(),
            critic=policy.critic_parameters(),
        )

    pair = pair_of(tmp_path, float64=False)
    policy, other = pair[0], pair_of(tmp_path, float64=False)[0]
    assert "critic.lm_head.weight" in policy.head_names()
    assert {name for name in policy.embedding_names() if name.startswith("critic.")}
    optimizer = optimizer_of(policy)
    gradients, _ = gradients_of(pair, iteration_of(), spec_of({}))
    for name, parameter in optimizer.stepped.items():
        parameter.grad = gradients[name]
    step_on_grads(optimizer, 0.01)
    saved = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    optimizer_of(other).load_state_tensors(saved)
    for name, parameter in other.critic_parameters().items():
        assert torch.equal(parameter, policy.critic_parameters()[name])
    plain = models(tmp_path, float64=False)[0]
    with pytest.raises(ContractViolation, match="optimizer state is not this model's"):
        optimizer_of(plain).load_state_tensors(saved)
