"""One rollout batch → its gradient, added to the iteration's.

Parameters do not move inside an iteration, and the loss is a sum over responses, so batches may come in any order.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from consumer.accumulation import GradientAccumulator
from consumer.advantages import grpo_advantages, shuffled_rewards
from consumer.iteration_stats import MicroBatchStats, measure_batch, measure_mismatch
from consumer.losses.grpo import grpo_loss
from consumer.micro_batch import MicroBatch, batch_rewards, make_micro_batch, rows_that_teach
from consumer.policy import Policy, response_logprobs
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec


def train_micro_batch(
    policy: Policy,
    reference: PreTrainedModel | None,
    batch: RolloutBatch,
    spec: JobSpec,
    accumulator: GradientAccumulator,
) -> MicroBatchStats:
    """Decode, advantages, forward, loss, backward, accumulate; `.grad` is None before and after.

    reference: the frozen initial model where spec.algorithm.kl_coefficient > 0, else None. A batch in which nothing
    teaches costs no forward pass. Raises ContractViolation for tokens that the model cannot take, TrainingDiverged for
    a loss or gradient that is not finite.
    """
    algorithm = spec.algorithm
    rewards = batch_rewards(batch)
    stats = measure_batch(batch, rewards)
    if algorithm.shuffle_rewards:
        rewards = shuffled_rewards(rewards, seed=spec.seed, batch_id=batch.batch_id)
    advantages = grpo_advantages(rewards, epsilon=algorithm.advantage_epsilon)
    rows = rows_that_teach(advantages, kl_coefficient=algorithm.kl_coefficient)
    if not rows.size:
        return stats
    micro_batch = make_micro_batch(batch, advantages=advantages, rows=rows)
    _check_fits(micro_batch, policy, batch_id=batch.batch_id)

    temperature = spec.rollout.sampling.temperature
    reference_logprobs = None
    if reference is not None:
        with torch.no_grad():
            reference_logprobs = response_logprobs(reference, micro_batch, temperature)
    logprobs = response_logprobs(policy.model, micro_batch, temperature)
    loss_mask = micro_batch.loss_mask.to(logprobs.device)
    loss = grpo_loss(
        logprobs,
        advantages=micro_batch.advantages.to(logprobs),
        loss_mask=loss_mask,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        reference_logprobs=reference_logprobs,
        kl_coefficient=algorithm.kl_coefficient,
    )
    loss_sum = loss.loss_sum.item()
    if not math.isfinite(loss_sum):
        raise TrainingDiverged(f"the loss of batch {batch.batch_id} is {loss_sum}", field="loss")
    mismatch = measure_mismatch(logprobs, micro_batch.generator_logprobs.to(logprobs.device), loss_mask)
    loss.loss_sum.backward()
    accumulator.add()
    return dataclasses.replace(
        stats, loss_sum=loss_sum, num_clipped=loss.num_clipped, k3_sum=loss.k3_sum, mismatch=mismatch
    )


def _check_fits(micro_batch: MicroBatch, policy: Policy, *, batch_id: str) -> None:
    prompt_width = micro_batch.input_ids.shape[1] + 1 - micro_batch.response_ids.shape[1]
    row_tokens = micro_batch.attention_mask[:, :prompt_width].sum(dim=1) + micro_batch.loss_mask.sum(dim=1)
    longest = int(row_tokens.max())
    if longest > policy.context_tokens:
        raise ContractViolation(
            f"batch {batch_id} has a row of {longest} tokens, the model's context is {policy.context_tokens}",
            field="token_ids",
        )
    used = np.concatenate((micro_batch.input_ids.numpy().reshape(-1), micro_batch.response_ids.numpy().reshape(-1)))
    if used.min() < 0 or used.max() >= policy.vocabulary_size:
        raise ContractViolation(
            f"batch {batch_id} has a token outside the vocabulary of {policy.vocabulary_size}", field="token_ids"
        )
