"""Credit that needs the models' outputs: a KL in the reward, and a critic's estimates.

outputs of the models ─▶ KL a token ─┬─▶ off the rewards, in a group (`penalised_advantages`)
                                     └─▶ off each token's reward ─▶ critic (`estimates`) ─▶ whitened
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.gradient.advantages.estimators import penalised_advantages
from consumer.gradient.advantages.gae import estimates, whitened
from consumer.gradient.micro_batch import BatchLayout, Pass
from consumer.gradient.terms.base import TokenOutputs
from consumer.gradient.terms.reference_kl import token_divergences
from contracts.spec.algorithm import AlgorithmSpec


def penalises(algorithm: AlgorithmSpec) -> bool:
    """Returns True where a KL to the reference is taken off the reward."""
    return algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "reward"


def needs_outputs(algorithm: AlgorithmSpec) -> bool:
    """Returns True where advantages are made of the models' outputs at the tokens."""
    return penalises(algorithm) or algorithm.advantage_kind.has_critic


def credited(layout: BatchLayout, outputs: Sequence[TokenOutputs], algorithm: AlgorithmSpec) -> BatchLayout:
    """Returns the layout with its final advantages.

    Args:
        layout: With one pass or more.
        outputs: The models' outputs at the tokens of each pass, before the iteration's first step.
        algorithm: The job's, for which `needs_outputs` is True.
    """
    divergences: list[Tensor] = []
    if penalises(algorithm):
        for of_pass, one_pass in zip(outputs, layout.passes, strict=True):
            loss_mask = one_pass.micro_batch.loss_mask.to(of_pass.policy.device)
            # In nats a token, before the coefficient.
            divergences.append(token_divergences(of_pass, loss_mask=loss_mask, estimator=algorithm.kl_estimator))
    if algorithm.advantage_kind.has_critic:
        return _by_critic(layout, outputs, divergences, algorithm)
    return _penalised(layout, divergences, algorithm)


def _penalised(layout: BatchLayout, divergences: Sequence[Tensor], algorithm: AlgorithmSpec) -> BatchLayout:
    """Takes each response's KL off its reward, and compares the groups anew. divergences: [R, T] of each pass."""
    # A sum over tokens and no mean: the KL of a sequence is the sum of its tokens'.
    sums = [divergence.sum(dim=1).cpu().numpy() for divergence in divergences]
    # [R] of each pass → [k, G]: under a KL every row goes through, in the order of the batch.
    penalties = algorithm.kl_coefficient * np.concatenate(sums).reshape(layout.rewards.shape)
    advantages = penalised_advantages(layout.rewards, penalties, algorithm)
    by_row = torch.from_numpy(advantages.reshape(-1))
    passes = tuple(
        replace(one_pass, micro_batch=replace(one_pass.micro_batch, advantages=by_row[torch.from_numpy(one_pass.rows)]))
        for one_pass in layout.passes
    )
    return replace(layout, advantages=advantages, passes=passes)


def _by_critic(
    layout: BatchLayout,
    outputs: Sequence[TokenOutputs],
    divergences: Sequence[Tensor],
    algorithm: AlgorithmSpec,
) -> BatchLayout:
    """Gives each token the advantage that its critic makes of the rewards.

    divergences: [R, T] of each pass, whose KL is taken off each token's reward; none where there is no such KL.
    """
    rewards = layout.rewards.reshape(-1)
    # [R, T] of each pass in nats, the coefficient in it; taken off the rewards, so a larger KL is less reward.
    penalties: list[Tensor | None] = [None] * len(layout.passes)
    if divergences:
        penalties = [algorithm.kl_coefficient * divergence for divergence in divergences]
    estimated = [
        _estimated(one_pass, of_pass, rewards[one_pass.rows], of_tokens, algorithm)
        for one_pass, of_pass, of_tokens in zip(layout.passes, outputs, penalties, strict=True)
    ]
    if algorithm.whitens_advantages:
        estimated = _whitened(estimated, algorithm)
    return replace(layout, advantages=_response_means(layout, estimated), passes=tuple(estimated))


def _estimated(
    one_pass: Pass,
    outputs: TokenOutputs,
    rewards: NDArray[np.float64],
    penalties: Tensor | None,
    algorithm: AlgorithmSpec,
) -> Pass:
    """Gives a pass the advantages that its critic makes of rewards [R]."""
    if outputs.values is None:
        raise ValueError("GAE needs a critic's values")
    micro_batch = one_pass.micro_batch
    pass_estimates = estimates(outputs.values, rewards, penalties, loss_mask=micro_batch.loss_mask, algorithm=algorithm)
    with_estimates = replace(micro_batch, advantages=pass_estimates.advantages, estimates=pass_estimates)
    return replace(one_pass, micro_batch=with_estimates)


def _whitened(passes: Sequence[Pass], algorithm: AlgorithmSpec) -> list[Pass]:
    """Normalises the advantages of a batch over all its passes; the returns that its critic learns stay."""
    normalised = whitened(
        [one_pass.micro_batch.advantages for one_pass in passes],
        [one_pass.micro_batch.loss_mask for one_pass in passes],
        epsilon=algorithm.advantage_epsilon,
    )
    return [
        replace(one_pass, micro_batch=replace(one_pass.micro_batch, advantages=advantages))
        for one_pass, advantages in zip(passes, normalised, strict=True)
    ]


def _response_means(layout: BatchLayout, passes: Sequence[Pass]) -> NDArray[np.float64]:
    """Returns the mean over each completion's tokens, [k, G]; 0.0 of those that didn't go through the model."""
    means = np.zeros(layout.rewards.size)
    for one_pass in passes:
        micro_batch = one_pass.micro_batch
        # 0.0 in padding, so a row's sum is that of its tokens; every row has one or more, so nothing is divided by 0.
        means[one_pass.rows] = (micro_batch.advantages.sum(dim=1) / micro_batch.loss_mask.sum(dim=1)).numpy()
    return means.reshape(layout.rewards.shape)
