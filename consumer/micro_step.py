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
from consumer.advantages.family import group_advantages
from consumer.advantages.groups import shuffled_rewards
from consumer.iteration_stats import MicroBatchStats, measure_batch, measure_mismatch
from consumer.losses.family import TokenLogprobs, family_loss, response_divergences
from consumer.losses.normalisers import BatchSizes
from consumer.micro_batch import MicroBatch, batch_rewards, make_micro_batch, rows_that_teach
from consumer.policy import Policy
from consumer.token_logprobs import response_logprobs, response_logprobs_and_entropy
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
    advantages = group_advantages(rewards, algorithm)
    rows = rows_that_teach(advantages, every_row=algorithm.needs_every_row)
    if not rows.size:
        return stats
    micro_batch = make_micro_batch(batch, advantages=advantages, rows=rows)
    _check_fits(micro_batch, policy, batch_id=batch.batch_id)

    logprobs = _token_logprobs(policy, reference, micro_batch, spec)
    loss_mask = micro_batch.loss_mask.to(logprobs.policy.device)
    if logprobs.reference is not None and algorithm.kl_placement == "reward":
        divergences = response_divergences(logprobs, loss_mask=loss_mask, estimator=algorithm.kl_estimator)
        rewards = rewards - algorithm.kl_coefficient * divergences.reshape(rewards.shape)
        advantages = group_advantages(rewards, algorithm)
        micro_batch = dataclasses.replace(micro_batch, advantages=torch.from_numpy(advantages.reshape(-1)))
    mismatch = measure_mismatch(logprobs.policy, logprobs.generator, loss_mask)
    loss = family_loss(
        logprobs,
        advantages=micro_batch.advantages.to(logprobs.policy),
        loss_mask=loss_mask,
        algorithm=algorithm,
        sizes=BatchSizes(num_tokens=stats.num_tokens, max_new_tokens=spec.rollout.sampling.max_new_tokens),
    )
    loss_sum = loss.loss_sum.item()
    if not math.isfinite(loss_sum):
        raise TrainingDiverged(f"the loss of batch {batch.batch_id} is {loss_sum}", field="loss")
    loss.loss_sum.backward()
    accumulator.add()
    return dataclasses.replace(
        stats,
        loss_sum=loss_sum,
        advantage_square_sum=math.fsum(np.square(advantages).reshape(-1)),
        num_clipped=loss.num_clipped,
        num_corrected=loss.num_corrected,
        k3_sum=loss.k3_sum,
        entropy_sum=loss.entropy_sum,
        mismatch=mismatch,
    )


def _token_logprobs(
    policy: Policy, reference: PreTrainedModel | None, micro_batch: MicroBatch, spec: JobSpec
) -> TokenLogprobs:
    """One pass of each model that the loss needs."""
    temperature = spec.rollout.sampling.temperature
    reference_logprobs = entropy = None
    if reference is not None:
        with torch.no_grad():
            reference_logprobs = response_logprobs(reference, micro_batch, temperature)
    if spec.algorithm.entropy_coefficient > 0.0:
        logprobs, entropy = response_logprobs_and_entropy(policy.model, micro_batch, temperature)
    else:
        logprobs = response_logprobs(policy.model, micro_batch, temperature)
    return TokenLogprobs(
        policy=logprobs,
        generator=micro_batch.generator_logprobs.to(logprobs.device),
        reference=reference_logprobs,
        entropy=entropy,
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
