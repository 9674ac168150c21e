"""One rollout batch → its gradient, added to the iteration's.

Parameters do not move between two optimizer steps, and the loss is a sum over responses, so batches may come in any
order. Where an iteration has several steps, those after the first train its batches again: `train_kept_batch`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.accumulation import GradientAccumulator
from consumer.advantages.family import group_advantages
from consumer.advantages.groups import shuffled_rewards
from consumer.iteration_stats import MicroBatchStats, measure_batch, measure_mismatch
from consumer.losses.family import LossTerms, TokenLogprobs, family_loss, response_divergences
from consumer.losses.normalisers import BatchSizes
from consumer.micro_batch import MicroBatch, batch_rewards, make_micro_batch, rows_that_teach
from consumer.policy import Policy
from consumer.token_logprobs import response_logprobs, response_logprobs_and_entropy
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """What the later updates of an iteration need of a batch: all that does not move with the weights."""

    batch: RolloutBatch
    rows: NDArray[np.int64]
    """Of the batch, those that went through the model."""
    advantages: NDArray[np.float64]
    """[k, G] with the KL in the reward, if there is one: it belongs to the rollout, not to the update."""
    old_logprobs: Tensor
    """[R, T] of the policy that sampled; detached."""
    reference_logprobs: Tensor | None
    """[R, T]."""


def train_micro_batch(
    policy: Policy,
    reference: PreTrainedModel | None,
    batch: RolloutBatch,
    spec: JobSpec,
    accumulator: GradientAccumulator,
) -> tuple[MicroBatchStats, KeptBatch | None]:
    """Decode, advantages, forward, loss, backward, accumulate; `.grad` is None before and after.

    reference: `Policy.reference` where spec.algorithm.kl_coefficient > 0, else None. A batch in which nothing
    teaches costs no forward pass, and there is nothing to keep of it. Raises ContractViolation for tokens that the
    model cannot take, TrainingDiverged for a loss or gradient that is not finite.
    """
    algorithm = spec.algorithm
    rewards = batch_rewards(batch)
    stats = measure_batch(batch, rewards)
    if algorithm.shuffle_rewards:
        rewards = shuffled_rewards(rewards, seed=spec.seed, batch_id=batch.batch_id)
    advantages = group_advantages(rewards, algorithm)
    stats = dataclasses.replace(stats, advantages=tuple(advantages.reshape(-1).tolist()))
    rows = rows_that_teach(advantages, every_row=algorithm.needs_every_row)
    if not rows.size:
        return stats, None
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
    kept = KeptBatch(
        batch=batch,
        rows=rows,
        advantages=advantages,
        old_logprobs=logprobs.policy.detach(),
        reference_logprobs=logprobs.reference,
    )
    stats = dataclasses.replace(stats, advantages=tuple(advantages.reshape(-1).tolist()), mismatch=mismatch)
    if algorithm.has_late_baseline:
        ones = dataclasses.replace(micro_batch, advantages=torch.ones_like(micro_batch.advantages))
        baseline = _backward(logprobs, ones, spec, stats, keep_graph=True)
        accumulator.add(to_baseline=True)
        stats = dataclasses.replace(stats, baseline_loss_sum=baseline.loss_sum.item())
    terms = _backward(logprobs, micro_batch, spec, stats)
    accumulator.add()
    return _with(stats, terms), kept


def train_kept_batch(
    policy: Policy, kept: KeptBatch, stats: MicroBatchStats, spec: JobSpec, accumulator: GradientAccumulator
) -> MicroBatchStats:
    """One batch of a later update: forward under the weights of now, loss against the kept log-probs, backward.

    stats: the batch's of the first update; answers them with the loss, the clips and the KL of this one. Raises
    TrainingDiverged like `train_micro_batch`.
    """
    micro_batch = make_micro_batch(kept.batch, advantages=kept.advantages, rows=kept.rows)
    logprobs = dataclasses.replace(
        _token_logprobs(policy, None, micro_batch, spec), old=kept.old_logprobs, reference=kept.reference_logprobs
    )
    terms = _backward(logprobs, micro_batch, spec, stats)
    accumulator.add()
    return _with(stats, terms)


def _backward(
    logprobs: TokenLogprobs, micro_batch: MicroBatch, spec: JobSpec, stats: MicroBatchStats, *, keep_graph: bool = False
) -> LossTerms:
    """The micro-batch's loss, its gradient left in `.grad`."""
    terms = family_loss(
        logprobs,
        advantages=micro_batch.advantages.to(logprobs.policy),
        loss_mask=micro_batch.loss_mask.to(logprobs.policy.device),
        algorithm=spec.algorithm,
        sizes=BatchSizes(num_tokens=stats.num_tokens, max_new_tokens=spec.rollout.sampling.max_new_tokens),
    )
    if not math.isfinite(terms.loss_sum.item()):
        raise TrainingDiverged(f"the loss of batch {stats.batch_id} is {terms.loss_sum.item()}", field="loss")
    terms.loss_sum.backward(retain_graph=keep_graph)
    return terms


def _with(stats: MicroBatchStats, terms: LossTerms) -> MicroBatchStats:
    return dataclasses.replace(
        stats,
        loss_sum=terms.loss_sum.item(),
        num_clipped=terms.num_clipped,
        num_corrected=terms.num_corrected,
        k3_sum=terms.k3_sum,
        entropy_sum=terms.entropy_sum,
    )


def _token_logprobs(
    policy: Policy, reference: PreTrainedModel | None, micro_batch: MicroBatch, spec: JobSpec
) -> TokenLogprobs:
    """One pass of each model that the loss needs."""
    temperature = spec.rollout.sampling.temperature
    reference_logprobs = entropy = None
    if reference is not None:
        with torch.no_grad(), policy.without_adapters():
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
