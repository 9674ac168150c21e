"""The advantage that a spec chooses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumer.gradient.advantages.dr_grpo import dr_grpo_advantages
from consumer.gradient.advantages.group_relative import centred_rewards
from consumer.gradient.advantages.grpo import grpo_advantages
from consumer.gradient.advantages.reinforce_plus_plus import undivided_advantages
from consumer.gradient.advantages.rloo import rloo_advantages
from contracts.spec_tables.algorithm import AlgorithmSpec


def group_advantages(rewards: NDArray[np.float64], algorithm: AlgorithmSpec) -> NDArray[np.float64]:
    """rewards: [k, G], G >= 2; answers [k, G], without what only the whole iteration knows."""
    match algorithm.advantage:
        case "grpo":
            return grpo_advantages(rewards, epsilon=algorithm.advantage_epsilon)
        case "dr_grpo":
            return dr_grpo_advantages(rewards)
        case "rloo":
            return rloo_advantages(rewards)
        case "reinforce++_baseline":
            return undivided_advantages(rewards)
        case "reinforce++":
            return rewards


def penalised_advantages(
    rewards: NDArray[np.float64], penalties: NDArray[np.float64], algorithm: AlgorithmSpec
) -> NDArray[np.float64]:
    """`group_advantages` of rewards less penalties, [k, G] each.

    grpo's deviation is that of the rewards alone: over that of both, a group of equal rewards would be all penalty,
    blown up to a deviation of 1 however small its weight is.
    """
    if algorithm.advantage == "grpo":
        return group_advantages(rewards, algorithm) - centred_rewards(penalties)
    return group_advantages(rewards - penalties, algorithm)
