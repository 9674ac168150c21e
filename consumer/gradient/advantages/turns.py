"""Credit by turn (`algorithm.credit = "turn"`): each turn of a trajectory has an advantage of its own.

    R_ik = r_ik + r_i(k+1) + ... + r_in           what trajectory i was given from its turn k on
    A_ik = A(R_1k, ..., R_Gk)_i                   over the trajectories of the group that have a turn k

A is the chosen advantage: with grpo this is (R_ik - mean_j R_jk) / (std_j R_jk + epsilon). It is the normalised return
of GTPO (Ding et al., arXiv 2511.14846), undiscounted: a turn isn't charged with what was given before it. All tokens of
a turn have its advantage. r_ik is the environment's reward for turn k; that of the last turn also has what scorers and
stages gave for the whole. So R_i0 is the reward of the trajectory, and where each has one turn this is credit by
trajectory, bit for bit. A turn that one trajectory alone has is compared with nothing: its advantage is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from consumer.gradient.advantages.group_relative import Rewards
from contracts.rollouts import RolloutBatch

DECIMALS = 12
"""Returns of later turns are rounded to them: what is equal stays equal, whichever rewards it is the sum of."""

TurnAdvantages = NDArray[np.float64]
"""[k, G, K], K turns of the trajectory that has most; 0.0 where a trajectory has ended."""


def turn_advantages(batch: RolloutBatch, rewards: Rewards, of_groups: Callable[[Rewards], Rewards]) -> TurnAdvantages:
    """Returns an advantage for each turn. rewards: [k, G]; of_groups: [1, n] returns → their advantages, n >= 2."""
    returns = [
        [_returns(row, reward) for row, reward in zip(_turn_rewards(batch, place), of_group, strict=True)]
        for place, of_group in enumerate(rewards.tolist())
    ]
    most = max(len(row) for of_group in returns for row in of_group)
    advantages = np.zeros((*rewards.shape, most))
    for place, of_group in enumerate(returns):
        for turn in range(most):
            alive = [sample for sample, row in enumerate(of_group) if len(row) > turn]
            if len(alive) > 1:
                advantages[place, alive, turn] = of_groups(np.array([[of_group[one][turn] for one in alive]]))[0]
    return advantages


def turns_of(batch: RolloutBatch) -> NDArray[np.int64]:
    """Returns [k, G] the number of turns of each completion."""
    return np.array([[len(one.completion.spans) for one in group.rollouts] for group in batch.groups])


def _turn_rewards(batch: RolloutBatch, place: int) -> list[list[float]]:
    """Returns [G][turns] what the environment gave for each turn of a group's trajectories."""
    trajectories = [rollout.completion.trajectory for rollout in batch.groups[place].rollouts]
    return [[0.0] if one is UNSET else [turn.reward for turn in one.turns] for one in trajectories]


def _returns(turn_rewards: list[float], reward: float) -> list[float]:
    """Takes off a trajectory's reward what its turns had been given before each of them."""
    later = [
        round(math.fsum([reward, *(-one for one in turn_rewards[:turn])]), DECIMALS)
        for turn in range(1, len(turn_rewards))
    ]
    return [reward, *later]
