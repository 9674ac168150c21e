"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438): each token against a critic's values.

    delta_t = r_t + gamma V_(t+1) - V_t          A_t = delta_t + gamma lambda A_(t+1)          R_t = A_t + V_t

V_t is what the critic expects before token t is sampled, r_t the reward for it: a completion's whole reward stands at
its last token, and a KL in the reward is taken off at each (InstructGPT, arXiv 2203.02155, 3.5). After the last token
nothing is expected, also where it was cut. R_t is what the critic learns (consumer/gradient/terms/value.py).

A batch's advantages are whitened, unless `whiten_advantages` says no, over all sampled tokens of the rollout batch that
go through the model; the returns are made before that:

    A'_t = (A_t - mean) / (std + epsilon)          std unbiased

Over the batch, and not the iteration, whose mean is known when its last batch is in: the spec cuts the batches, so that
neither the order of arrival nor the number of ranks shows (I7), and a batch is trained when it comes
(docs/decisions/0009-critic.md).

Worked example, gamma = 1, lambda = 0.5, a reward of 1 for three tokens whose values are 0.5, 0.5 and 1:

    delta = [0, 0.5, 0]          A = [0.25, 0.5, 0]          R = [0.75, 1, 1]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from contracts.spec.algorithm import AlgorithmSpec
from onbeat.loop.sampled import unbiased_std

LAMBDA = 1.0


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """The advantages and returns of one pass, before the iteration's first step; [R, T] each, 0.0 in padding.

    `estimates` creates them, the value term reads them in every update, and nothing changes them.
    """

    advantages: Tensor
    """float64."""
    returns: Tensor
    """float64."""
    values: Tensor
    """The critic's values, detached."""


def estimates(
    values: Tensor,
    rewards: NDArray[np.float64],
    penalties: Tensor | None,
    *,
    loss_mask: Tensor,
    algorithm: AlgorithmSpec,
) -> Estimates:
    """Computes a pass' advantages and returns in float64.

    Args:
        values: [R, T], what the critic expects before each token.
        rewards: [R] of whole completions.
        penalties: [R, T] that is taken off each token's reward; None for none.
        loss_mask: bool [R, T], whose rows begin with their True.
        algorithm: The job's, with discount and lambda.
    """
    values = values.detach()
    real = loss_mask.cpu().numpy()
    # [R, T] V_t; 0.0 in padding, so that nothing is expected after the last token.
    expected = np.where(real, values.double().cpu().numpy(), 0.0)
    token_rewards = np.zeros_like(expected)
    if penalties is not None:
        # A penalty is taken off each token's reward: hence the sign.
        token_rewards = -np.where(real, penalties.double().cpu().numpy(), 0.0)
    # The reward of the whole completion stands at its last token: a row has its True first, so their count - 1.
    token_rewards[np.arange(len(token_rewards)), real.sum(axis=1) - 1] += rewards
    discount = algorithm.discount
    if discount is UNSET:
        discount = 1.0
    gae_lambda = algorithm.gae_lambda
    if gae_lambda is UNSET:
        gae_lambda = LAMBDA
    trace = discount * gae_lambda
    advantages = np.zeros_like(expected)
    # From the last token to the first: A_t is made of A_(t+1).
    # In padding all is 0: the last token of a row has neither a value nor an advantage after it.
    next_value = next_advantage = np.zeros(len(expected))
    for token in range(expected.shape[1] - 1, -1, -1):
        # delta_t = r_t + gamma V_(t+1) - V_t.
        delta = token_rewards[:, token] + discount * next_value - expected[:, token]
        next_advantage = np.where(real[:, token], delta + trace * next_advantage, 0.0)
        next_value = expected[:, token]
        advantages[:, token] = next_advantage
    return Estimates(
        # R_t = A_t + V_t, before the advantages are whitened.
        advantages=torch.from_numpy(advantages),
        returns=torch.from_numpy(advantages + expected),
        values=values,
    )


def whitened(advantages: Sequence[Tensor], loss_masks: Sequence[Tensor], *, epsilon: float) -> list[Tensor]:
    """Normalises the advantages of a rollout batch, over its tokens in all passes.

    Args:
        advantages: float64 [R, T] of each pass.
        loss_masks: bool [R, T] of each pass, True on sampled tokens.
        epsilon: added to the deviation.

    Returns:
        float64 [R, T] of each pass, 0.0 in padding. Equal advantages, and a single one, are exactly 0.0.
    """
    tokens = [
        advantage for values, mask in zip(advantages, loss_masks, strict=True) for advantage in values[mask].tolist()
    ]
    if min(tokens) == max(tokens):
        # A rounded mean would leave a residue that a division by epsilon magnifies.
        return [torch.zeros_like(values) for values in advantages]
    # fsum rounds once: how the batch was cut into passes doesn't show.
    mean = math.fsum(tokens) / len(tokens)
    deviation = unbiased_std(tokens) + epsilon
    return [
        ((values - mean) / deviation).masked_fill(~mask, 0.0)
        for values, mask in zip(advantages, loss_masks, strict=True)
    ]
