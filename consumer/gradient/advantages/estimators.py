"""The advantage that a spec chooses, and what each is made of: what a group knows, what the iteration does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from consumer.gradient.advantages.group_relative import Rewards, centred_rewards, grpo_advantages, rloo_advantages
from consumer.gradient.advantages.reinforce_plus_plus import LateScale, centred_scale, mean_and_scale
from consumer.gradient.advantages.turns import TurnAdvantages, turn_advantages
from contracts.rollouts import RolloutBatch
from contracts.spec_tables.algorithm import AlgorithmSpec


def no_late_scale(_advantages: Sequence[float], _epsilon: float) -> LateScale:
    """Returns the scale of an advantage that its group knows altogether."""
    return LateScale()


@dataclass(frozen=True, kw_only=True)
class Advantage:
    """A member of the family. `ADVANTAGE_KINDS` of contracts/spec_tables/algorithm.py says what goes with it."""

    of_groups: Callable[[Rewards, float], Rewards]
    """(rewards, epsilon) → [k, G]; a group of equal rewards gives exactly 0.0 unless the baseline is late."""
    of_penalties: Callable[[Rewards], Rewards] | None = None
    """Penalties [k, G] → what is taken off the advantages, [k, G]; None: they are taken off the rewards."""
    late: Callable[[Sequence[float], float], LateScale] = no_late_scale
    """(`of_groups` of all completions of the iteration in any order, epsilon) → what is left to do."""


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
