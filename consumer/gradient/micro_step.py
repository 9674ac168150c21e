"""One rollout batch → its gradient, added to the iteration's.

Parameters do not move between two optimizer steps, and the loss is a sum over responses, so batches may come in any
order. Where an iteration has several steps, those after the first train its batches again: `train_kept_batch`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import GradientAccumulator
from consumer.gradient.advantages.family import group_advantages, penalised_advantages
from consumer.gradient.advantages.group_relative import shuffled_rewards
from consumer.gradient.log_probs import response_logprobs, response_logprobs_and_entropy
from consumer.gradient.losses.family import LossTerms, TokenLogprobs, family_loss, response_divergences
from consumer.gradient.losses.normalisers import BatchSizes
from consumer.gradient.micro_batch import MicroBatch, batch_rewards, make_micro_batch, rows_that_teach, split_rows
from consumer.gradient.statistics import MicroBatchStats, Mismatch, measure_batch, measure_mismatch
from consumer.model.policy import Policy
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """The rows of one pass, and what the first update measured of them."""

    rows: NDArray[np.int64]
    """Of the batch."""
    old_logprobs: Tensor
    """[R, T] of the policy that sampled; detached."""
    reference_logprobs: Tensor | None
    """[R, T]."""


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """What the later updates of an iteration need of a batch: all that does not move with the weights."""

    batch: RolloutBatch
    advantages: NDArray[np.float64]
    """[k, G] with the KL in the reward, if there is one: it belongs to the rollout, not to the update."""
    passes: tuple[KeptRows, ...]


def train_micro_batch(
    policy: Policy,
    reference: PreTrainedModel | None,
    batch: RolloutBatch,
    spec: JobSpec,
    accumulator: GradientAccumulator,
) -> tuple[MicroBatchStats, KeptBatch | None]:
    """Decode, advantages, forward, loss, backward, accumulate; `.grad` is None before and after.

    A batch with more tokens than a pass may have goes through in several, always the same ones, and the accumulator
    rounds the gradient of each (I7). reference: `Policy.reference` where
    spec.algorithm.kl_coefficient > 0, else None. A batch in which nothing teaches costs no forward pass, and there is
    nothing to keep of it. Raises ContractViolation for tokens that the model cannot take, TrainingDiverged for a loss
    or gradient that is not finite.
    """
    algorithm, trainer = spec.algorithm, spec.trainer
    rewards = batch_rewards(batch)
    stats = measure_batch(batch, rewards)
    if algorithm.shuffle_rewards:
        rewards = shuffled_rewards(rewards, seed=spec.seed, batch_id=batch.batch_id)
    advantages = group_advantages(rewards, algorithm)
    stats = dataclasses.replace(stats, advantages=tuple(advantages.reshape(-1).tolist()))
    rows = rows_that_teach(advantages, every_row=algorithm.needs_every_row)
    if not rows.size:
        return stats, None
    parts = split_rows(batch, rows, packing=trainer.packing, max_tokens=trainer.max_tokens_per_micro_batch)
    micro_batches = [_micro_batch(batch, part, advantages, spec) for part in parts]
    for micro_batch in micro_batches:
        _check_fits(micro_batch, policy, batch_id=batch.batch_id)
    forward = functools.partial(_token_logprobs, policy, reference, spec=spec)
    # The only pass of a batch serves everything that is asked of it.
    known = [forward(micro_batch) for micro_batch in micro_batches] if len(parts) == 1 else []
    if reference is not None and algorithm.kl_placement == "reward":
        with torch.no_grad():
            measured = known or [forward(micro_batch) for micro_batch in micro_batches]
        penalties = _penalties(rewards.shape, measured, micro_batches, spec)
        advantages = penalised_advantages(rewards, penalties, algorithm)
        micro_batches = [_micro_batch(batch, part, advantages, spec) for part in parts]
    stats = dataclasses.replace(stats, advantages=tuple(advantages.reshape(-1).tolist()))
    if algorithm.has_late_baseline:
        ones = [dataclasses.replace(one, advantages=torch.ones_like(one.advantages)) for one in micro_batches]
        logprobs = known or map(forward, ones)
        terms: list[LossTerms] = []
        for micro_batch, measured in zip(ones, logprobs, strict=True):
            terms.append(_backward(measured, micro_batch, spec, stats, keep_graph=bool(known)))
            accumulator.add(to_baseline=True, more=len(terms) < len(parts))
        stats = dataclasses.replace(stats, baseline_loss_sum=sum(one.loss_sum.item() for one in terms))

    passes: list[KeptRows] = []
    terms = []
    mismatch = Mismatch()
    for part, micro_batch, logprobs in zip(parts, micro_batches, known or map(forward, micro_batches), strict=True):
        loss_mask = micro_batch.loss_mask.to(logprobs.policy.device)
        mismatch = mismatch.joined(measure_mismatch(logprobs.policy, logprobs.generator, loss_mask))
        old_logprobs = logprobs.policy.detach()
        passes.append(KeptRows(rows=part, old_logprobs=old_logprobs, reference_logprobs=logprobs.reference))
        terms.append(_backward(logprobs, micro_batch, spec, stats))
        accumulator.add(more=len(terms) < len(parts))
    stats = dataclasses.replace(_with(stats, terms), mismatch=mismatch)
    return stats, KeptBatch(batch=batch, advantages=advantages, passes=tuple(passes))


def train_kept_batch(
    policy: Policy, kept: KeptBatch, stats: MicroBatchStats, spec: JobSpec, accumulator: GradientAccumulator
) -> MicroBatchStats:
    """One batch of a later update: forward under the weights of now, loss against the kept log-probs, backward.

    stats: the batch's of the first update; answers them with the loss, the clips and the KL of this one. Raises
    TrainingDiverged like `train_micro_batch`.
    """
    terms: list[LossTerms] = []
    for one in kept.passes:
        micro_batch = _micro_batch(kept.batch, one.rows, kept.advantages, spec)
        logprobs = dataclasses.replace(
            _token_logprobs(policy, None, micro_batch, spec=spec),
            old=one.old_logprobs,
            reference=one.reference_logprobs,
        )
        terms.append(_backward(logprobs, micro_batch, spec, stats))
        accumulator.add(more=len(terms) < len(kept.passes))
    return _with(stats, terms)


def _micro_batch(
    batch: RolloutBatch, rows: NDArray[np.int64], advantages: NDArray[np.float64], spec: JobSpec
) -> MicroBatch:
    return make_micro_batch(batch, advantages=advantages, rows=rows, packing=spec.trainer.packing)


def _penalties(
    shape: tuple[int, ...], measured: list[TokenLogprobs], micro_batches: list[MicroBatch], spec: JobSpec
) -> NDArray[np.float64]:
    """The weighted divergence of each completion, in that shape [k, G]; measured: pass by pass, every row."""
    algorithm = spec.algorithm
    divergences = [
        response_divergences(
            logprobs, loss_mask=micro_batch.loss_mask.to(logprobs.policy.device), estimator=algorithm.kl_estimator
        )
        for logprobs, micro_batch in zip(measured, micro_batches, strict=True)
    ]
    return algorithm.kl_coefficient * np.concatenate(divergences).reshape(shape)


def _backward(
    logprobs: TokenLogprobs, micro_batch: MicroBatch, spec: JobSpec, stats: MicroBatchStats, *, keep_graph: bool = False
) -> LossTerms:
    """The loss of one pass, its gradient added to `.grad`."""
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
    # Detached, or every pass's graph would live until the last one.
    return dataclasses.replace(terms, loss_sum=terms.loss_sum.detach())


def _with(stats: MicroBatchStats, terms: list[LossTerms]) -> MicroBatchStats:
    """The batch's numbers, with the sums over its passes."""
    return dataclasses.replace(
        stats,
        loss_sum=sum(one.loss_sum.item() for one in terms),
        num_clipped_low=sum(one.num_clipped_low for one in terms),
        num_clipped_high=sum(one.num_clipped_high for one in terms),
        can_clip=any(one.can_clip for one in terms),
        num_corrected=sum(one.num_corrected for one in terms),
        k3_sum=sum(one.k3_sum for one in terms),
        entropy_sum=sum(one.entropy_sum for one in terms),
        num_entropy_tokens=sum(one.num_entropy_tokens for one in terms),
    )


def _token_logprobs(
    policy: Policy, reference: PreTrainedModel | None, micro_batch: MicroBatch, *, spec: JobSpec
) -> TokenLogprobs:
    """One pass of each model that the loss needs."""
    temperature = spec.rollout.sampling.temperature
    reference_logprobs = entropy = None
    if reference is not None:
        with torch.no_grad(), policy.without_adapters():
            reference_logprobs = response_logprobs(reference, micro_batch, temperature)
    if spec.algorithm.entropy_coefficient > 0.0 or spec.trainer.measure_entropy:
        logprobs, entropy = response_logprobs_and_entropy(policy.model, micro_batch, temperature)
        if spec.algorithm.entropy_coefficient == 0.0:
            entropy = entropy.detach()
    else:
        logprobs = response_logprobs(policy.model, micro_batch, temperature)
    return TokenLogprobs(
        policy=logprobs,
        generator=micro_batch.generator_logprobs.to(logprobs.device),
        reference=reference_logprobs,
        entropy=entropy,
    )


def _check_fits(micro_batch: MicroBatch, policy: Policy, *, batch_id: str) -> None:
    inputs = micro_batch.inputs
    # Positions start at 0, and a response's last token is never an input.
    longest = int(inputs.position_ids.max()) + 2
    if longest > policy.context_tokens:
        raise ContractViolation(
            f"batch {batch_id} has a row of {longest} tokens, the model's context is {policy.context_tokens}",
            field="token_ids",
        )
    used = np.concatenate((inputs.input_ids.numpy().reshape(-1), micro_batch.response_ids.numpy().reshape(-1)))
    if used.min() < 0 or used.max() >= policy.vocabulary_size:
        raise ContractViolation(
            f"batch {batch_id} has a token outside the vocabulary of {policy.vocabulary_size}", field="token_ids"
        )
