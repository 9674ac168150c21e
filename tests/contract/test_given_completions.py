"""`loss = "sft"`: the gradient is the equation's over given tokens, whatever sampled them and whatever they earn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.micro_step import train_micro_batch
from contracts.rollouts import RolloutBatch
from tests.builders import job_spec, rollout_batch
from tests.contract.test_streamed_gradient import assert_same_bits_in_any_order, relative_error, streamed_gradient
from tests.contract.test_streamed_losses import equation_gradient, load, models, one_group_each
from tests.loss_equations import Equation

SFT: dict[str, Any] = {"algorithm__loss": "sft", "algorithm__advantage": "none", "rollout__group_size": 1}


def given_iteration() -> list[RolloutBatch]:
    return [
        rollout_batch(seed=70 + index, num_groups=4, group_size=1, response_tokens=(1, 7), batch_id=f"0/train/{index}")
        for index in range(4)
    ]


@pytest.mark.parametrize("packing", ["shared_prompt", "padded"])
def test_the_streamed_gradient_is_that_of_the_equation(tmp_path: Path, packing: str) -> None:
    pair, batches = models(tmp_path, float64=True), given_iteration()
    expected = equation_gradient(pair, batches, Equation(loss="sft", advantage="none"))
    spec = job_spec(**SFT, trainer__packing=packing, trainer__max_tokens_per_micro_batch=40)
    assert relative_error(streamed_gradient(pair[0], batches, spec), expected) < 1e-8
    assert relative_error(streamed_gradient(pair[0], one_group_each(batches), spec), expected) < 1e-8


def test_arrival_orders_give_the_same_bits(tmp_path: Path) -> None:
    policy, batches, spec = load(tmp_path), given_iteration(), job_spec(**SFT)
    assert_same_bits_in_any_order(lambda batches: streamed_gradient(policy, batches, spec), batches, orders=5)


def test_neither_rewards_nor_log_probs_of_sampling_change_it_and_there_is_no_mismatch(tmp_path: Path) -> None:
    policy, batch, spec = load(tmp_path), given_iteration()[0], job_spec(**SFT)
    groups = tuple(
        replace(
            group,
            rollouts=tuple(
                replace(
                    one,
                    reward=one.reward + 3.0,
                    completion=replace(one.completion, generator_logprobs=bytes(len(one.completion.token_ids))),
                )
                for one in group.rollouts
            ),
        )
        for group in batch.groups
    )
    given = replace(batch, groups=groups)
    expected = streamed_gradient(policy, [batch], spec)
    assert all(torch.equal(one, expected[name]) for name, one in streamed_gradient(policy, [given], spec).items())
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    stats, _ = train_micro_batch(policy, given, reference=None, spec=spec, accumulator=accumulator)
    policy.model.zero_grad(set_to_none=True)
    assert (stats.mismatch.k3, stats.mismatch.largest, stats.mismatch.effective_sample_share) == (0.0, 0.0, 1.0)
    assert stats.mismatch.num_tokens == stats.num_tokens
