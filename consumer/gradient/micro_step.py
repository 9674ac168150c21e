"""The gradient of one rollout batch, added to the iteration's sums.

    lay out     rewards → advantages → rows that teach → passes         micro_batch.py    no model
    forward     the outputs that the terms of the loss need             log_probs.py      each model once
    credit      a KL in the reward, a critic's estimates                credit.py         only where a job has one
    sum         token losses of each term, in order; one scalar         terms/            no model
    backward    the scalar's gradient, left in `.grad`                  torch
    add         rounded once, added to the iteration's sums             accumulation.py

Parameters do not move between two optimizer steps, and the loss is a sum over responses, so batches may come in any
order. Steps after the first of an iteration train batches that it has kept: `train_kept_batch`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.accumulation import GradientAccumulator
from consumer.gradient.advantages.estimators import batch_rewards
from consumer.gradient.advantages.gae import Estimates
from consumer.gradient.advantages.group_relative import flat_advantages
from consumer.gradient.credit import credited, needs_outputs
from consumer.gradient.log_probs import token_outputs
from consumer.gradient.losses.base import BatchSizes
from consumer.gradient.losses.family import policy_loss
from consumer.gradient.micro_batch import MicroBatch, lay_out
from consumer.gradient.statistics import BatchStats, mismatch_over
from consumer.gradient.terms.base import LossTerm, TermInputs, TermLoss, TokenOutputs, needs_every_row
from consumer.gradient.terms.correction import Correction
from consumer.gradient.terms.table import terms_of_job
from consumer.model.offloaded_activations import activations_of_pass
from consumer.model.policy import Policy
from contracts.encoding.names import number_of
from contracts.errors import TrainingDiverged
from contracts.rollouts import RolloutBatch
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.job import JobSpec


@dataclass(frozen=True, kw_only=True)
class KeptPass:
    """A pass with the log-probs that the first update measured; a part of a `KeptBatch`."""

    rows: NDArray[np.int64]
    """[R] of the batch."""
    micro_batch: MicroBatch
    """Its advantages have the KL in the reward, if there is one: it belongs to the rollout, not to the update."""
    old_logprobs: Tensor
    """[R, T] log pi_old, of the policy before the iteration's first step; detached."""
    reference_logprobs: Tensor | None
    """[R, T] log pi_ref; None where no term needs them."""


@dataclass(frozen=True, kw_only=True)
class KeptBatch:
    """A batch as the later updates of its iteration need it: all its numbers that don't move with the weights.

    `train_micro_batch` makes it, a `Learner` keeps it until the iteration's last step, and nothing changes it.
    """

    batch: RolloutBatch
    stats: BatchStats
    """The numbers of the first update."""
    passes: tuple[KeptPass, ...]


@dataclass(frozen=True, kw_only=True)
class PassLoss:
    """The loss of one pass. `pass_loss` creates it, and its sums go into the batch's numbers."""

    loss_sum: Tensor
    """Scalar with gradient, undivided: see `Normaliser`."""
    sums: Mapping[str, float]
    """The sums of the terms, by name."""


def train_micro_batch(
    policy: Policy,
    batch: RolloutBatch,
    *,
    reference: PreTrainedModel | None,
    spec: JobSpec,
    accumulator: GradientAccumulator | None,
) -> tuple[BatchStats, KeptBatch | None]:
    """Adds the gradient of a batch to the sums. `.grad` is None before and after.

    A batch with more tokens than a pass may have goes through in several, and the accumulator rounds the gradient of
    each (I7). A batch in which nothing teaches costs no forward pass.

    Args:
        policy: The policy before the iteration's first step.
        batch: As the fence has accepted it.
        reference: `Policy.reference` where `spec.loads_reference`, else None: a column of the batch has its log-probs,
            or no term needs them.
        spec: The job's.
        accumulator: The iteration's sums; None: the batch is only measured, for a later step.

    Returns:
        The batch's numbers, and the batch as later updates need it; None where nothing teaches.

    Raises:
        ContractViolation: For tokens that the model cannot take, and for a column that is not there.
        TrainingDiverged: For a loss or gradient that is not finite.
    """
    terms = terms_of_job(spec)
    layout = lay_out(batch, spec=spec, policy=policy, every_row=needs_every_row(terms))
    # Rewards are measured as sampled: a negative control reports what its policy earned.
    measured = BatchStats.of(batch, batch_rewards(batch))
    if not layout.passes:
        advantages = layout.advantages
        if policy.critic is not None:
            # The rewards of an untrained batch went through no critic, and are no advantages.
            advantages = np.zeros_like(advantages)
        return replace(measured, advantages=flat_advantages(advantages, batch)), None
    forward = functools.partial(_outputs, policy, terms=terms, reference=reference, spec=spec)
    train_pass = functools.partial(_train_pass, stats=measured, terms=terms, spec=spec, accumulator=accumulator)
    with torch.set_grad_enabled(accumulator is not None):
        # A batch of one pass goes through the models once, for credit and loss. The passes of a larger one go through
        # again when their gradient is due: their graphs together would be what the cut is there to avoid.
        only_outputs: TokenOutputs | None = None
        if len(layout.passes) == 1:
            only_outputs = forward(layout.passes[0].micro_batch)
        if needs_outputs(spec.algorithm):
            # Credit is no part of the graph. The outputs of a single pass keep theirs, which the loss goes back
            # through; those of several passes have none here, and are made again below.
            with torch.no_grad():
                if only_outputs is not None:
                    outputs = [only_outputs]
                else:
                    outputs = [forward(one_pass.micro_batch) for one_pass in layout.passes]
            layout = credited(layout, outputs, spec.algorithm)
            del outputs
        # In the order of the passes, which is that of the rows in the batch.
        losses: list[PassLoss] = []
        kept_passes: list[KeptPass] = []
        for number, one_pass in enumerate(layout.passes, start=1):
            micro_batch = one_pass.micro_batch
            tokens = only_outputs
            if tokens is None:
                tokens = forward(micro_batch)
            losses.append(train_pass(tokens, micro_batch, more=number < len(layout.passes)))
            kept_passes.append(
                KeptPass(
                    rows=one_pass.rows,
                    micro_batch=micro_batch,
                    # Detached: the constant against which later updates take their ratio.
                    old_logprobs=tokens.policy.detach(),
                    reference_logprobs=tokens.reference,
                )
            )
    stats = replace(
        _with_losses(measured, losses),
        advantages=flat_advantages(layout.advantages, batch),
        trained_rows=tuple(np.concatenate([one_pass.rows for one_pass in layout.passes]).tolist()),
        mismatch=mismatch_over(kept_passes, learns_given=spec.algorithm.learns_given),
    )
    return stats, KeptBatch(batch=batch, stats=stats, passes=tuple(kept_passes))


def train_kept_batch(
    policy: Policy, kept_batch: KeptBatch, *, spec: JobSpec, accumulator: GradientAccumulator
) -> BatchStats:
    """Trains a batch in a later update: forward under the weights of now, loss against the kept log-probs, backward.

    Returns:
        The batch's numbers of the first update, with the loss and the sums of this one.

    Raises:
        TrainingDiverged: As `train_micro_batch`.
    """
    # The same terms, in the same order, as in the first update.
    terms = terms_of_job(spec)
    losses: list[PassLoss] = []
    for number, one_pass in enumerate(kept_batch.passes, start=1):
        outputs = _outputs(policy, one_pass.micro_batch, terms=terms, reference=None, spec=spec)
        losses.append(
            _train_pass(
                replace(outputs, old=one_pass.old_logprobs, reference=one_pass.reference_logprobs),
                one_pass.micro_batch,
                stats=kept_batch.stats,
                terms=terms,
                spec=spec,
                accumulator=accumulator,
                more=number < len(kept_batch.passes),
            )
        )
    return _with_losses(kept_batch.stats, losses)


def pass_without_gradient(
    policy: Policy,
    micro_batch: MicroBatch,
    *,
    reference: PreTrainedModel | None,
    spec: JobSpec,
    accumulator: GradientAccumulator,
) -> None:
    """Goes forward and backward as `train_micro_batch` does, with a loss that is 0 whatever the models say.

    It takes the memory of a pass and leaves everything as it was: `.grad` is None and the sums are the same.

    Args:
        policy: The policy, with its teacher's reader where the job has one.
        micro_batch: The largest that the job can yield (consumer/ranks/dry_pass.py).
        reference: As `train_micro_batch` takes it.
        spec: The job's.
        accumulator: The sums, which get zeros.

    Raises:
        TrainingDiverged: For an output that is not finite: 0 times it is no number.
    """
    outputs = _outputs(policy, micro_batch, terms=terms_of_job(spec), reference=reference, spec=spec)
    of_tokens = [outputs.policy, outputs.entropy, outputs.values, outputs.divergence]
    # Whatever the job's loss is, it is a sum over these outputs: each graph is kept until the backward pass reaches it.
    sums = [values.sum() for values in of_tokens if values is not None and values.requires_grad]
    (torch.stack([total.float() for total in sums]).sum() * 0.0).backward()
    accumulator.add_zeros()


def measured_logprobs(batch: RolloutBatch, kept_batch: KeptBatch | None) -> tuple[bytes | None, ...]:
    """Returns the log-probs that the first update measured, for the recording of a batch.

    Args:
        batch: The rollout batch.
        kept_batch: As `train_micro_batch` returned it.

    Returns:
        Little-endian float32 of each sampled token, for each completion; None for a completion that didn't go through
        the model.
    """
    logprobs: list[bytes | None] = [None] * batch.num_completions
    if kept_batch is None:
        return tuple(logprobs)
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    for one_pass in kept_batch.passes:
        # '<f4' is the wire's byte order, whatever the machine's is.
        values = one_pass.old_logprobs.float().cpu().numpy().astype("<f4", copy=False)
        for place, row in enumerate(one_pass.rows.tolist()):
            # Only the row's own tokens: behind them the row is padding, 0.0.
            logprobs[row] = values[place, : rollouts[row].completion.num_sampled].tobytes()
    return tuple(logprobs)


def pass_loss(
    outputs: TokenOutputs,
    *,
    terms: Sequence[LossTerm],
    advantages: Tensor,
    loss_mask: Tensor,
    algorithm: AlgorithmSpec,
    sizes: BatchSizes,
    estimates: Estimates | None = None,
) -> PassLoss:
    """Sums the terms of one pass:

        normaliser of ((sum of the terms that are weighed) * correction + sum of the others)

    Args:
        outputs: The models' outputs at the tokens.
        terms: In the order in which they are added, which is part of a job's digest.
        advantages: [R], or [R, T] with credit by turn or token; in the log-probs' dtype.
        loss_mask: bool [R, T], one True or more in each row; on the log-probs' device.
        algorithm: The job's.
        sizes: The rollout batch's, for the normaliser.
        estimates: The returns that a critic learns; None without one.
    """
    tokens = outputs.masked(loss_mask)
    # pi_old of the ratio is the generator's mu, or the trainer's own policy before the first step; in that step, where
    # `tokens.old` is None, it is the policy itself.
    old_logprobs = tokens.old
    if algorithm.old_policy == "generator":
        old_logprobs = tokens.generator
    # pi_prox of the correction is always the trainer's.
    prox_logprobs = tokens.old
    if prox_logprobs is None:
        prox_logprobs = tokens.policy
    inputs = TermInputs(
        tokens=tokens,
        old_logprobs=old_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
        correction=Correction.of(
            algorithm,
            prox_logprobs=prox_logprobs,
            generator_logprobs=tokens.generator,
            loss_mask=loss_mask,
        ),
        estimates=estimates,
    )
    # All terms are computed in order before any is added: the order in which their graphs are made is that in which
    # their gradients meet at the log-probs.
    losses = [(term.is_weighed, term.token_losses(inputs)) for term in terms]
    weighed = _added(loss.token_loss for is_weighed, loss in losses if is_weighed)
    if weighed is not None:
        weighed = inputs.correction.weigh(weighed)
    others = (loss.token_loss for is_weighed, loss in losses if not is_weighed)
    token_loss = _added((weighed, *others))
    if token_loss is None:
        raise ValueError("a loss needs a term that gives one")
    return PassLoss(
        # A sum in which each row has its weight, not yet divided by the iteration's count: micro-batches add up.
        loss_sum=policy_loss(algorithm).normaliser.reduce(token_loss, loss_mask, sizes),
        sums=_joined_sums([loss for _, loss in losses]),
    )


def _joined_sums(losses: Sequence[TermLoss]) -> dict[str, float]:
    """Puts the sums of all terms together. Raises ValueError where two terms use one name."""
    sums: dict[str, float] = {}
    for loss in losses:
        for name, value in loss.sums.items():
            if name in sums:
                raise ValueError(f"two terms of the loss sum `{name}`; give each sum a name of its own")
            sums[name] = value
    return sums


def _added(token_losses: Iterable[Tensor | None]) -> Tensor | None:
    """Adds token losses [R, T] from the left, but for those that are None; None where all are."""
    total: Tensor | None = None
    for token_loss in token_losses:
        if token_loss is None:
            continue
        # No 0.0 + first: the sum starts with the first itself.
        total = token_loss if total is None else total + token_loss
    return total


def _outputs(
    policy: Policy,
    micro_batch: MicroBatch,
    *,
    terms: Sequence[LossTerm],
    reference: PreTrainedModel | None,
    spec: JobSpec,
) -> TokenOutputs:
    """Passes a micro-batch through the models: `token_outputs`, its activations where the job has them."""
    models = [model for model in (policy.model, policy.critic) if model is not None]
    with activations_of_pass(spec.trainer, models):
        return token_outputs(
            policy, micro_batch, terms=terms, reference=reference, temperature=spec.rollout.sampling.temperature
        )


def _train_pass(
    outputs: TokenOutputs,
    micro_batch: MicroBatch,
    *,
    stats: BatchStats,
    terms: Sequence[LossTerm],
    spec: JobSpec,
    accumulator: GradientAccumulator | None,
    more: bool,
) -> PassLoss:
    """Sums the terms of one pass, goes backward, and adds the gradient to the sums, where there are any.

    more: another pass of the batch follows.
    """
    loss = pass_loss(
        outputs,
        terms=terms,
        # float64 → the log-probs' dtype: the one rounding of an advantage.
        advantages=micro_batch.advantages.to(outputs.policy),
        loss_mask=micro_batch.loss_mask.to(outputs.policy.device),
        algorithm=spec.algorithm,
        sizes=BatchSizes(num_tokens=stats.num_tokens, max_sampled_tokens=spec.max_sampled_tokens),
        estimates=micro_batch.estimates,
    )
    # Before the backward pass: a NaN in the loss would be a NaN in every parameter's gradient, which names none.
    if not math.isfinite(loss.loss_sum.item()):
        raise TrainingDiverged(f"the loss of batch {stats.batch_id} is {loss.loss_sum.item()}", field="loss")
    if accumulator is not None:
        # Leaves the gradient of the loss in `.grad`; the optimizer subtracts it, so a loss goes down.
        loss.loss_sum.backward()
        accumulator.add(number_of(stats.batch_id), more=more)
    # Detached, or every pass's graph would live until the last one.
    return replace(loss, loss_sum=loss.loss_sum.detach())


def _with_losses(stats: BatchStats, losses: Sequence[PassLoss]) -> BatchStats:
    """Returns the batch's numbers with the loss and the sums over its passes."""
    sums: dict[str, float] = {}
    for loss in losses:
        for name, value in loss.sums.items():
            sums[name] = sums.get(name, 0.0) + value
    return replace(stats, loss_sum=sum(loss.loss_sum.item() for loss in losses), term_sums=sums)
