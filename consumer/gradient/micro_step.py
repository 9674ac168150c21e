"""One rollout batch → its gradient, added to the iteration's.

Parameters do not move between two optimizer steps, and the loss is a sum over responses, so batches may come in any
order. Steps after the first of an iteration train batches that it has kept: `train_kept_batch`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import GradientAccumulator
from consumer.gradient.advantages.estimators import batch_advantages, compared_rewards, penalised_advantages
from consumer.gradient.advantages.gae import estimates, whitened
from consumer.gradient.advantages.group_relative import shuffled_rewards, turns_of
from consumer.gradient.log_probs import check_fits, response_logprobs, response_measures, response_values
from consumer.gradient.losses.base import BatchSizes
from consumer.gradient.losses.objective import LossSums, LossTerms, TokenLogprobs, micro_batch_loss, token_divergences
from consumer.gradient.micro_batch import (
    MicroBatch,
    batch_rewards,
    is_truncated,
    make_micro_batch,
    rows_that_teach,
    split_rows,
)
from consumer.gradient.statistics import BatchStats, Mismatch, joined, measure_mismatch
from consumer.model.policy import Policy
from contracts.encoding.names import number_of
from contracts.errors import ContractViolation, TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.job import JobSpec
from contracts.spec.stages import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, read_columns
from onbeat.base import kernels
from onbeat.data.sampled_values import FEWEST_ROWS


@dataclass(frozen=True, kw_only=True)
class KeptRows:
    """One pass, and what the first update measured of it."""

    rows: NDArray[np.int64]
    """[R] of the batch."""
    micro_batch: MicroBatch
    """Its advantages have the KL in the reward, if there is one: it belongs to the rollout, not to the update."""
    old_logprobs: Tensor
    """[R, T] log pi_old, of the policy that sampled; detached."""
    reference_logprobs: Tensor | None
    """[R, T] log pi_ref; None without a KL term."""


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """What the later updates of an iteration need of a batch: all that does not move with the weights."""

    batch: RolloutBatch
    passes: tuple[KeptRows, ...]


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch as it stands before a model has seen it."""

    rewards: NDArray[np.float64]
    """[k, G] as they are trained: shuffled, where the job is a negative control."""
    advantages: NDArray[np.float64]
    """[k, G], or [k, G, K] of turns."""
    passes: tuple[NDArray[np.int64], ...]
    """[R] rows of the batch in each pass, ascending; none where nothing teaches."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPass:
    """One pass, whose advantages are final."""

    rows: NDArray[np.int64]
    """[R] of the batch."""
    micro_batch: MicroBatch
    logprobs: Callable[[], TokenLogprobs]
    """Returns what the models give to its tokens, with the graph of the policy: a forward pass, or a known value."""


def train_micro_batch(
    policy: Policy,
    batch: RolloutBatch,
    *,
    reference: PreTrainedModel | None,
    spec: JobSpec,
    accumulator: GradientAccumulator | None,
) -> tuple[BatchStats, KeptBatch | None]:
    """Prepares, measures, goes backward and accumulates; `.grad` is None before and after.

        prepare    rewards → advantages, rows that teach, passes       no model
        measure    log-probs of a batch of one pass; KL in the reward  forward
        backward   loss and gradient of each pass, into the sum        forward where it isn't known, backward

    A batch with more tokens than a pass may have goes through in several, always the same ones, and the accumulator
    rounds the gradient of each (I7). Without an accumulator the batch is measured alone, for a later step. reference:
    `Policy.reference` where `spec.loads_reference`, else None: a column of the batch has its log-probs, or no KL is
    asked for.
    A batch in which nothing teaches costs no forward pass, and there is nothing to keep of it. Raises ContractViolation
    for tokens that the model cannot take and for a column that is not there, TrainingDiverged for a loss or gradient
    that is not finite.
    """
    _check_columns(batch, spec)
    if spec.algorithm.distillation_beta is not UNSET:
        assert policy.teacher is not None, "make_learner gives it to each policy"
        policy.teacher.check(batch)
    # They are measured as sampled: a negative control reports what its policy earned.
    measured = BatchStats.of(batch, batch_rewards(batch))
    prepared = _prepare(batch, spec)
    if not prepared.passes:
        # Without a pass a critic has no say, and what isn't trained has no advantage.
        advantages = prepared.advantages if policy.critic is None else np.zeros_like(prepared.advantages)
        return replace(measured, advantages=_flat(advantages, batch)), None
    forward = functools.partial(_token_logprobs, policy, reference=reference, spec=spec)
    with torch.set_grad_enabled(accumulator is not None):
        passes, advantages = _measure(batch, prepared, policy=policy, forward=forward, spec=spec)
        stats, kept_rows = _backward(passes, measured, spec=spec, accumulator=accumulator)
    kept = KeptBatch(batch=batch, passes=tuple(kept_rows))
    rows = tuple(np.concatenate(prepared.passes).tolist())
    return replace(stats, advantages=_flat(advantages, batch), trained_rows=rows), kept


def train_kept_batch(
    policy: Policy, kept: KeptBatch, *, stats: BatchStats, spec: JobSpec, accumulator: GradientAccumulator
) -> BatchStats:
    """Trains a batch in a later update: forward under the weights of now, loss against the kept log-probs, backward.

    stats: the batch's of the first update; returns them with the loss, the clips and the KL of this one. Raises
    TrainingDiverged like `train_micro_batch`.
    """

    def measured(one: KeptRows) -> MeasuredPass:
        def logprobs() -> TokenLogprobs:
            now = _token_logprobs(policy, one.micro_batch, reference=None, spec=spec)
            return replace(now, old=one.old_logprobs, reference=one.reference_logprobs)

        return MeasuredPass(rows=one.rows, micro_batch=one.micro_batch, logprobs=logprobs)

    trained = _add_gradients([measured(one) for one in kept.passes], stats, spec=spec, accumulator=accumulator)
    return _summed(stats, [terms for _, terms in trained])


def measured_logprobs(batch: RolloutBatch, kept: KeptBatch | None) -> tuple[bytes | None, ...]:
    """Returns what the first update measured at each sampled token, float32 for each completion; None for one that
    didn't go through the model. kept: as `train_micro_batch` returned it."""
    found: list[bytes | None] = [None] * batch.num_completions
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for one in kept.passes if kept is not None else ():
        values = one.old_logprobs.float().cpu().numpy().astype("<f4", copy=False)
        for place, row in enumerate(one.rows.tolist()):
            found[row] = values[place, : rollouts[row].completion.num_sampled].tobytes()
    return tuple(found)


def _check_columns(batch: RolloutBatch, spec: JobSpec) -> None:
    """Raises ContractViolation where a column is missing that the loss reads: without it a term would be left out."""
    columns = batch.columns or {}
    for name, (is_read, _) in read_columns(spec.algorithm, spec.stages).items():
        if is_read and name not in columns and not (name == REFERENCE_LOGPROBS and spec.loads_reference):
            raise ContractViolation(f"batch {batch.batch_id} came without the column {name}", field="columns")


def _prepare(batch: RolloutBatch, spec: JobSpec) -> PreparedBatch:
    """Makes all that needs no model."""
    rewards = compared_rewards(batch, batch_rewards(batch), spec)
    if spec.algorithm.shuffle_rewards:
        rewards = shuffled_rewards(rewards, seed=spec.seed, batch_id=batch.batch_id)
    advantages = batch_advantages(batch, rewards, spec.algorithm)
    rows = rows_that_teach(advantages, every_row=spec.algorithm.needs_every_row)
    if spec.algorithm.on_truncated == "mask":
        rows = rows[[not is_truncated(batch, row) for row in rows.tolist()]]
    packing, max_tokens = spec.trainer.packing, spec.trainer.max_tokens_per_micro_batch
    passes = tuple(split_rows(batch, rows, packing=packing, max_tokens=max_tokens)) if rows.size else ()
    return PreparedBatch(rewards=rewards, advantages=advantages, passes=passes)


def maker(policy: Policy, batch: RolloutBatch, spec: JobSpec) -> Callable[..., MicroBatch]:
    """Returns `make_micro_batch` of the batch, laid out and sampled as the job says."""
    packing, sampling = spec.trainer.packing, spec.rollout.sampling
    # No part of a vector is left over, and no product by oneDNN has to copy its rows.
    multiple_of = kernels.ROWS if spec.model.is_by_onednn else FEWEST_ROWS if packing == "as_sampled" else 1
    return functools.partial(
        make_micro_batch, batch, packing=packing, multiple_of=multiple_of, sampling=sampling, end_ids=policy.end_ids
    )


def _measure(
    batch: RolloutBatch,
    prepared: PreparedBatch,
    *,
    policy: Policy,
    forward: Callable[[MicroBatch], TokenLogprobs],
    spec: JobSpec,
) -> tuple[list[MeasuredPass], NDArray[np.float64]]:
    """Makes the passes with their final advantages, and returns those of the whole batch beside them."""
    algorithm, advantages = spec.algorithm, prepared.advantages
    make = maker(policy, batch, spec)
    micro_batches = [make(rows=rows, advantages=advantages) for rows in prepared.passes]
    for micro_batch in micro_batches:
        check_fits(micro_batch, policy, batch_id=batch.batch_id)
    # A batch of one pass goes through the models once, for all that is asked of it. The passes of a larger one go
    # through again when their gradient is due: their graphs together would be what the split is there to avoid.
    known = [forward(micro_batch) for micro_batch in micro_batches] if len(micro_batches) == 1 else []
    divergences: list[Tensor | None] = [None] * len(micro_batches)
    penalises = algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "reward"
    has_critic = policy.critic is not None
    with torch.no_grad():
        measured = known or ([forward(one) for one in micro_batches] if penalises or has_critic else [])
    if penalises:
        divergences = [
            token_divergences(
                logprobs, loss_mask=micro_batch.loss_mask.to(logprobs.policy.device), estimator=algorithm.kl_estimator
            )
            for logprobs, micro_batch in zip(measured, micro_batches, strict=True)
        ]
    if has_critic:
        micro_batches = [
            _estimated(one, logprobs, prepared.rewards.reshape(-1)[rows], divergence, algorithm)
            for one, logprobs, rows, divergence in zip(
                micro_batches, measured, prepared.passes, divergences, strict=True
            )
        ]
        if algorithm.whitens_advantages:
            micro_batches = _whitened(micro_batches, algorithm)
        advantages = _response_advantages(micro_batches, prepared)
    elif penalises:
        # [R] of each pass → [k, G]: under a KL every row goes through, in the order of the batch.
        sums = [one.sum(dim=1).cpu().numpy() for one in divergences if one is not None]
        penalties = algorithm.kl_coefficient * np.concatenate(sums).reshape(prepared.rewards.shape)
        advantages = penalised_advantages(prepared.rewards, penalties, algorithm)
        micro_batches = [make(rows=rows, advantages=advantages) for rows in prepared.passes]
    passes = [
        MeasuredPass(
            rows=rows,
            micro_batch=micro_batch,
            logprobs=(lambda: known[0]) if known else functools.partial(forward, micro_batch),
        )
        for rows, micro_batch in zip(prepared.passes, micro_batches, strict=True)
    ]
    return passes, advantages


def _estimated(
    micro_batch: MicroBatch,
    logprobs: TokenLogprobs,
    rewards: NDArray[np.float64],
    divergence: Tensor | None,
    algorithm: AlgorithmSpec,
) -> MicroBatch:
    """Gives a pass the advantages that its critic makes of rewards [R]."""
    if logprobs.values is None:
        raise ValueError("GAE needs a critic's values")
    penalties = None if divergence is None else algorithm.kl_coefficient * divergence
    found = estimates(logprobs.values, rewards, penalties, loss_mask=micro_batch.loss_mask, algorithm=algorithm)
    return replace(micro_batch, advantages=found.advantages, estimates=found)


def _whitened(micro_batches: Sequence[MicroBatch], algorithm: AlgorithmSpec) -> list[MicroBatch]:
    """Normalises the advantages of a batch over all its passes; the returns that its critic learns stay."""
    normalised = whitened(
        [one.advantages for one in micro_batches],
        [one.loss_mask for one in micro_batches],
        epsilon=algorithm.advantage_epsilon,
    )
    return [replace(one, advantages=advantages) for one, advantages in zip(micro_batches, normalised, strict=True)]


def _response_advantages(micro_batches: Sequence[MicroBatch], prepared: PreparedBatch) -> NDArray[np.float64]:
    """Returns the mean over each completion's tokens, [k, G]; 0.0 of one that didn't go through the model."""
    means = np.zeros(prepared.rewards.size)
    for rows, micro_batch in zip(prepared.passes, micro_batches, strict=True):
        means[rows] = (micro_batch.advantages.sum(dim=1) / micro_batch.loss_mask.sum(dim=1)).numpy()
    return means.reshape(prepared.rewards.shape)


def _backward(
    passes: Sequence[MeasuredPass], stats: BatchStats, *, spec: JobSpec, accumulator: GradientAccumulator | None
) -> tuple[BatchStats, list[KeptRows]]:
    """Adds the batch's gradient to the sum, and measures its passes."""
    kept: list[KeptRows] = []
    all_terms: list[LossTerms] = []
    gaps: list[Mismatch] = []
    trained = _add_gradients(passes, stats, spec=spec, accumulator=accumulator)
    for one, (logprobs, terms) in zip(passes, trained, strict=True):
        old = logprobs.policy.detach()
        # What is given was sampled by no policy, from which this one could be apart.
        sampler = old if spec.algorithm.learns_given else logprobs.generator
        gaps.append(measure_mismatch(old, sampler, one.micro_batch.loss_mask.to(old.device)))
        kept.append(
            KeptRows(
                rows=one.rows, micro_batch=one.micro_batch, old_logprobs=old, reference_logprobs=logprobs.reference
            )
        )
        all_terms.append(terms)
    return replace(_summed(stats, all_terms), mismatch=joined(gaps)), kept


def _add_gradients(
    passes: Sequence[MeasuredPass],
    stats: BatchStats,
    *,
    spec: JobSpec,
    accumulator: GradientAccumulator | None,
) -> Iterator[tuple[TokenLogprobs, LossTerms]]:
    """Yields the log-probs and the loss of each pass, whose gradient is in the sum by then, where there is one."""
    for number, one in enumerate(passes, start=1):
        logprobs = one.logprobs()
        loss_mask = one.micro_batch.loss_mask.to(logprobs.policy.device)
        terms = micro_batch_loss(
            logprobs,
            # float64 → the log-probs' dtype: the one rounding of an advantage.
            advantages=one.micro_batch.advantages.to(logprobs.policy),
            loss_mask=loss_mask,
            algorithm=spec.algorithm,
            sizes=BatchSizes(num_tokens=stats.num_tokens, max_sampled_tokens=spec.max_sampled_tokens),
            lags=spec.schedule_rule.lags,
            estimates=one.micro_batch.estimates,
        )
        if not math.isfinite(terms.loss_sum.item()):
            raise TrainingDiverged(f"the loss of batch {stats.batch_id} is {terms.loss_sum.item()}", field="loss")
        if accumulator is not None:
            terms.loss_sum.backward()
            accumulator.add(number_of(stats.batch_id), more=number < len(passes))
        # Detached, or every pass's graph would live until the last one.
        yield logprobs, replace(terms, loss_sum=terms.loss_sum.detach())


def _summed(stats: BatchStats, terms: list[LossTerms]) -> BatchStats:
    """Returns the batch's numbers, with the sums over its passes."""
    sums = {one.name: sum(getattr(of_pass, one.name) for of_pass in terms) for one in fields(LossSums)}
    sums |= {name: bool(sums[name]) for name in ("can_clip", "has_teacher")}
    return replace(stats, loss_sum=sum(one.loss_sum.item() for one in terms), **sums)


def _flat(advantages: NDArray[np.float64], batch: RolloutBatch) -> tuple[float, ...]:
    """Returns the advantage of every completion, or of every turn that was played."""
    if advantages.ndim == 3:
        advantages = advantages[np.arange(advantages.shape[2]) < turns_of(batch)[:, :, None]]
    return tuple(advantages.reshape(-1).tolist())


def _token_logprobs(
    policy: Policy, micro_batch: MicroBatch, *, reference: PreTrainedModel | None, spec: JobSpec
) -> TokenLogprobs:
    """Passes once through each model that the loss needs."""
    algorithm, temperature = spec.algorithm, spec.rollout.sampling.temperature
    reference_logprobs = micro_batch.column(REFERENCE_LOGPROBS)
    if reference is not None:
        with torch.no_grad(), policy.without_adapters():
            reference_logprobs = response_logprobs(reference, micro_batch, temperature)
    teacher = policy.teacher
    logprobs, entropy, divergence = response_measures(
        policy.model,
        micro_batch,
        temperature,
        entropy=algorithm.entropy_coefficient > 0.0 or spec.trainer.measure_entropy,
        summary=None if teacher is None else teacher.divergence,
        known=None if teacher is None else teacher.known(micro_batch.columns),
    )
    if entropy is not None and algorithm.entropy_coefficient == 0.0:
        entropy = entropy.detach()
    return TokenLogprobs(
        policy=logprobs,
        generator=micro_batch.generator_logprobs.to(logprobs.device),
        reference=reference_logprobs,
        teacher=micro_batch.column(TEACHER_LOGPROBS),
        divergence=divergence,
        entropy=entropy,
        values=None if policy.critic is None else response_values(policy.critic, micro_batch),
    )
