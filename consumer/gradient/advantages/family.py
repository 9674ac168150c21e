"""The advantage that a spec chooses."""

from __future__ import annotations

import numpy as np

from consumer.gradient.advantages.base import Advantage, Rewards
from consumer.gradient.advantages.group_relative import centred_rewards, grpo_advantages, rloo_advantages
from consumer.gradient.advantages.reinforce_plus_plus import centred_scale, mean_and_scale
from consumer.gradient.advantages.turns import TurnAdvantages, turn_advantages
from contracts.rollouts import RolloutBatch
from contracts.spec_tables.algorithm import AlgorithmSpec

ADVANTAGES = {
    # Over the deviation of rewards and penalties together, a group of equal rewards would be all penalty, blown up to
    # a deviation of 1 however small its weight is: so grpo's deviation is that of the rewards alone.
    "grpo": Advantage(
        of_groups=lambda rewards, epsilon: grpo_advantages(rewards, epsilon=epsilon), of_penalties=centred_rewards
    ),
    "dr_grpo": Advantage(of_groups=lambda rewards, _: centred_rewards(rewards)),
    "rloo": Advantage(of_groups=lambda rewards, _: rloo_advantages(rewards)),
    "reinforce++_baseline": Advantage(of_groups=lambda rewards, _: centred_rewards(rewards), late=centred_scale),
    "reinforce++": Advantage(of_groups=lambda rewards, _: rewards, late=mean_and_scale),
    "none": Advantage(of_groups=lambda rewards, _: np.zeros_like(rewards)),
}
"""A line for each name of `ADVANTAGE_KINDS`."""


def group_advantages(rewards: Rewards, algorithm: AlgorithmSpec) -> Rewards:
    """Returns [k, G], without what only the whole iteration knows. rewards: [k, G]."""
    return ADVANTAGES[algorithm.advantage].of_groups(rewards, algorithm.advantage_epsilon)


def batch_advantages(batch: RolloutBatch, rewards: Rewards, algorithm: AlgorithmSpec) -> Rewards | TurnAdvantages:
    """Returns `group_advantages` [k, G], or with credit by turn those of each turn, [k, G, K]. rewards: [k, G]."""
    if not algorithm.credits_turns:
        return group_advantages(rewards, algorithm)
    return turn_advantages(batch, rewards, lambda returns: group_advantages(returns, algorithm))


def penalised_advantages(rewards: Rewards, penalties: Rewards, algorithm: AlgorithmSpec) -> Rewards:
    """Returns `group_advantages` of rewards less penalties, [k, G] each."""
    of_penalties = ADVANTAGES[algorithm.advantage].of_penalties
    if of_penalties is None:
        return group_advantages(rewards - penalties, algorithm)
    return group_advantages(rewards, algorithm) - of_penalties(penalties)
