"""The advantage that a spec chooses: the part that a group's rewards decide, and the part that the iteration decides.

GDPO (Liu et al., arXiv 2601.05242) normalises each component n of a reward by itself before they are summed. So none
drowns the others by its size, and unlike completions don't get the same:

    A_n,i = (r_n,i - mean) / (std + epsilon)                         of its group
    A_i   = s_i / (std of all s + epsilon),  s_i = sum_n w_n A_n,i   of the iteration: `centred_deviation`, late

In a group the s add up to 0. An environment's reward is a component of weight 1.

REINFORCE++ (Hu et al., arXiv 2501.03262), in its form for several samples a prompt:

    reinforce++_baseline   A_i = r'_i / (std of all r' of the iteration + epsilon),  r'_i = r_i - mean of its group

That deviation is known when the last batch is in. Every loss of the family is linear in a positive scale of the
advantages, so a micro-batch trains on r', and the iteration's gradient is divided by the deviation once, at the end
(I7). Nothing is subtracted then: every baseline is taken off the rewards in float64, before the loss rounds an
advantage to its own dtype. The gradients of r and of 1, summed apart, would be two large rounded numbers with a small
difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from consumer.gradient.advantages.group_relative import (
    Rewards,
    TurnAdvantages,
    centred_rewards,
    grpo_advantages,
    rloo_advantages,
    turn_advantages,
)
from contracts.rewards import named
from contracts.rollouts import RolloutBatch, RolloutGroup
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.job import JobSpec
from onbeat.loop.sampled import unbiased_std


def centred_deviation(centred: Sequence[float], _earned: Sequence[float], epsilon: float) -> float:
    """Returns std + epsilon, with the unbiased std; centred: every r', in any order. Their mean is 0."""
    # The mean isn't subtracted again: it is 0 but for rounding. fsum rounds once, so that no order shows.
    return math.sqrt(math.fsum(value * value for value in centred) / (len(centred) - 1)) + epsilon


def earned_deviation(_: Sequence[float], earned: Sequence[float], epsilon: float) -> float:
    """Returns std + epsilon, with the unbiased std of the rewards as earned."""
    return unbiased_std(earned) + epsilon


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """A kind of advantage, in the table `ADVANTAGES`. `ADVANTAGE_KINDS` of contracts/spec/kinds.py has its rules."""

    of_groups: Callable[[Rewards, float], Rewards]
    """(rewards, epsilon) → [k, G]; where groups are compared, one of equal rewards gives exactly 0.0."""
    of_penalties: Callable[[Rewards], Rewards] | None = None
    """Penalties [k, G] → numbers [k, G] that are taken off the advantages; None: the rewards are penalised instead."""
    late_deviation: Callable[[Sequence[float], Sequence[float], float], float] = lambda *_: 1.0
    """(`of_groups` of the iteration's completions in any order, their rewards, epsilon) → the deviation that is known
    when the iteration's last batch is in: `of_groups` / deviation is the advantage."""


ADVANTAGES = {
    # Over the deviation of rewards and penalties together, a group of equal rewards would be all penalty, blown up to
    # a deviation of 1 however small its weight is: so grpo's deviation is that of the rewards alone.
    "grpo": Advantage(
        of_groups=lambda rewards, epsilon: grpo_advantages(rewards, epsilon=epsilon), of_penalties=centred_rewards
    ),
    "dr_grpo": Advantage(of_groups=lambda rewards, _: centred_rewards(rewards)),
    "rloo": Advantage(of_groups=lambda rewards, _: rloo_advantages(rewards)),
    "gdpo": Advantage(of_groups=lambda sums, _: centred_rewards(sums), late_deviation=centred_deviation),
    "lite_ppo": Advantage(of_groups=lambda rewards, _: centred_rewards(rewards), late_deviation=earned_deviation),
    "reinforce++_baseline": Advantage(
        of_groups=lambda rewards, _: centred_rewards(rewards), late_deviation=centred_deviation
    ),
    "gae": Advantage(of_groups=lambda rewards, _: rewards),
    "none": Advantage(of_groups=lambda rewards, _: np.zeros_like(rewards)),
}
"""A line for each name of `ADVANTAGE_KINDS`."""


def group_advantages(rewards: Rewards, algorithm: AlgorithmSpec) -> Rewards:
    """Returns the advantages [k, G] of rewards [k, G], undivided by a deviation of the iteration (`late_deviation`)."""
    return ADVANTAGES[algorithm.advantage].of_groups(rewards, algorithm.advantage_epsilon)


def batch_advantages(batch: RolloutBatch, rewards: Rewards, algorithm: AlgorithmSpec) -> Rewards | TurnAdvantages:
    """Returns `group_advantages` [k, G], or with credit by turn those of each turn, [k, G, K]. rewards: [k, G]."""
    if not algorithm.credits_turns:
        return group_advantages(rewards, algorithm)
    penalises = algorithm.on_truncated == "penalise"
    return turn_advantages(batch, rewards, lambda returns: group_advantages(returns, algorithm), penalises=penalises)


def penalised_advantages(rewards: Rewards, penalties: Rewards, algorithm: AlgorithmSpec) -> Rewards:
    """Returns `group_advantages` of rewards less penalties, [k, G] each."""
    of_penalties = ADVANTAGES[algorithm.advantage].of_penalties
    if of_penalties is None:
        return group_advantages(rewards - penalties, algorithm)
    # Minus: a penalty above the group's mean makes a completion worse.
    return group_advantages(rewards, algorithm) - of_penalties(penalties)


def batch_rewards(batch: RolloutBatch) -> Rewards:
    """Returns the rewards, float64 [k, G], in the order of the batch."""
    return np.array([[rollout.reward for rollout in group.rollouts] for group in batch.groups], dtype=np.float64)


def compared_rewards(batch: RolloutBatch, rewards: Rewards, spec: JobSpec) -> Rewards:
    """Returns [k, G]. rewards: as earned, [k, G]."""
    if not spec.algorithm.advantage_kind.normalises_components:
        return clipped(rewards, spec.algorithm)
    weights = {name: component.weight for name, component in named(spec.reward.components)} | spec.stage_reward_weights
    return np.array([_normalised_sum(group, weights, spec.algorithm) for group in batch.groups])


def clipped(rewards: Rewards, algorithm: AlgorithmSpec) -> Rewards:
    """Returns rewards of any shape, each of them within `reward_clip` of 0 where the spec has one."""
    bound = algorithm.reward_clip
    if bound is UNSET:
        return rewards
    # Both signs: a penalty counts no more than a reward.
    return np.clip(rewards, -bound, bound)


def _normalised_sum(group: RolloutGroup, weights: dict[str, float], algorithm: AlgorithmSpec) -> Rewards:
    """Returns [G] sums over the components that score this group; a component of a mixture may not."""
    breakdowns = [rollout.reward_breakdown for rollout in group.rollouts]
    parts: list[tuple[float, list[float]]] = []
    for name, weight in weights.items():
        # All completions of a group were scored by the same components.
        if name in breakdowns[0]:
            parts.append((weight, [breakdown[name] for breakdown in breakdowns]))
    # The environment's reward is a component of weight 1, and 0.0 for a completion without a trajectory.
    environment_rewards = [0.0] * len(group.rollouts)
    for place, rollout in enumerate(group.rollouts):
        trajectory = rollout.completion.trajectory
        if trajectory is not UNSET:
            environment_rewards[place] = trajectory.reward
    parts.append((1.0, environment_rewards))
    total = np.zeros(len(group.rollouts))
    # The order of the sum is part of a job's digest: the spec's components first, the environment last.
    for weight, component_rewards in parts:
        values = clipped(np.array([component_rewards], dtype=np.float64), algorithm)
        # [1, G] → [G]: each component is normalised by itself before its weight counts.
        total += weight * grpo_advantages(values, epsilon=algorithm.advantage_epsilon)[0]
    return total
