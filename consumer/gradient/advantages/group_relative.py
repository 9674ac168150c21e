"""Advantages that compare a reward with those of its group: GRPO, Dr. GRPO and RLOO, and Lite PPO's numerator.

    grpo      A_i = (r_i - mean) / (std + epsilon)           Shao et al., arXiv 2402.03300, section 4.1.2
    dr_grpo   A_i = r_i - mean                               Liu et al., arXiv 2503.20783, section 3.2
    rloo      A_i = r_i - 1/(G - 1) sum_{j != i} r_j         Ahmadian et al., arXiv 2402.14740
                  = G/(G - 1) (r_i - mean)
    lite_ppo  A_i = (r_i - mean) / (std + epsilon), std of the iteration's rewards     Liu et al., arXiv 2508.08221

dr_grpo leaves the deviation out: a prompt that is nearly always solved, or nearly never, weighs no more than another.
rloo's baseline doesn't contain the reward that it is taken off, so it is unbiased.

Every function of groups takes rewards [k, G], a row for each group with G >= 2, and returns [k, G] in float64: the loss
rounds once, to its own dtype.

Credit by turn (`algorithm.credit = "turn"`): each turn of a trajectory has an advantage of its own.

    R_ik = r_ik + r_i(k+1) + ... + r_in           what trajectory i was given from its turn k on
    A_ik = A(R_1k, ..., R_Gk)_i                   over the trajectories of the group that have a turn k

A is the chosen advantage: with grpo this is (R_ik - mean_j R_jk) / (std_j R_jk + epsilon). It is the normalised return
of GTPO (Ding et al., arXiv 2511.14846), undiscounted: a turn isn't charged with what was given before it. All tokens of
a turn have its advantage. r_ik is the environment's reward for turn k; that of the last turn also has what scorers and
stages gave for the whole. So R_i0 is the reward of the trajectory, and where each has one turn this is credit by
trajectory, bit for bit. A turn that one trajectory alone has is compared with nothing: its advantage is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from contracts.rollouts import RolloutBatch, RolloutGroup
from onbeat.loop.sampled import equal_groups

Rewards = NDArray[np.float64]
"""[k, G], a row for each group."""
DECIMALS = 12
"""Returns of later turns are rounded to them: what is equal stays equal, whichever rewards it is the sum of."""

TurnAdvantages = NDArray[np.float64]
"""[k, G, K], K turns of the trajectory that has most; 0.0 where a trajectory has ended."""


def grpo_advantages(rewards: Rewards, *, epsilon: float) -> Rewards:
    """Divides by the unbiased std (ddof = 1) of the group."""
    # epsilon is added to the deviation, outside the root, as the peers do.
    return centred_rewards(rewards) / (rewards.std(axis=1, ddof=1, keepdims=True) + epsilon)


def rloo_advantages(rewards: Rewards) -> Rewards:
    """Subtracts the mean of the other samples."""
    size = rewards.shape[1]
    # r_i less the mean of the other G - 1 is G/(G - 1) times r_i less the mean of all G.
    return centred_rewards(rewards) * (size / (size - 1))


def centred_rewards(rewards: Rewards) -> Rewards:
    """Returns r - mean of its group, which is dr_grpo's advantage.

    A group of equal rewards gives exactly 0.0, where a rounded mean would leave a residue that a division magnifies.
    """
    return np.where(equal_groups(rewards)[:, None], 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def shuffled_rewards(rewards: Rewards, *, seed: int, batch_id: str) -> Rewards:
    """Puts each group's rewards into a random order of its own: the negative control.

    The order depends on (seed, batch id) alone, so that a batch that is trained again is shuffled the same way (I7).
    """
    # Philox takes a key of 128 bits: 16 bytes, read little-endian on every machine.
    key = hashlib.blake2b(f"{seed}/{batch_id}/shuffled_rewards".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    # permuted, and not permutation: each row in an order of its own.
    return random.permuted(rewards, axis=1)


def turn_advantages(
    batch: RolloutBatch, rewards: Rewards, of_groups: Callable[[Rewards], Rewards], *, penalises: bool
) -> TurnAdvantages:
    """Computes an advantage for each turn of each trajectory.

    Args:
        batch: The rollout batch, whose trajectories say what each turn was given.
        rewards: [k, G] of whole trajectories.
        of_groups: Returns [1, n] of a turn, n >= 2 → their advantages [1, n].
        penalises: True where the reward of a trajectory that was cut is stated by the spec, in place of what its turns
            had been given.
    """
    returns: list[list[list[float]]] = []
    for group, group_rewards in zip(batch.groups, rewards.tolist(), strict=True):
        turn_rewards = _turn_rewards(group, penalises)
        returns.append([_returns(row, reward) for row, reward in zip(turn_rewards, group_rewards, strict=True)])
    most_turns = max(len(row) for group_returns in returns for row in group_returns)
    advantages = np.zeros((*rewards.shape, most_turns))
    for place, group_returns in enumerate(returns):
        for turn in range(most_turns):
            # The trajectories of the group that have this turn.
            alive = [sample for sample, row in enumerate(group_returns) if len(row) > turn]
            # A turn that one trajectory alone has is compared with nothing: its advantage stays 0.
            if len(alive) > 1:
                turn_returns = np.array([[group_returns[sample][turn] for sample in alive]])
                advantages[place, alive, turn] = of_groups(turn_returns)[0]
    return advantages


def turns_of(batch: RolloutBatch) -> NDArray[np.int64]:
    """Returns [k, G] the number of turns of each completion."""
    return np.array([[len(rollout.completion.spans) for rollout in group.rollouts] for group in batch.groups])


def flat_advantages(advantages: Rewards | TurnAdvantages, batch: RolloutBatch) -> tuple[float, ...]:
    """Returns the advantage of every completion, or of every turn that was played."""
    if advantages.ndim == 3:
        # [k, G, K] → the turns that were played, in order: turn number < the completion's turns.
        advantages = advantages[np.arange(advantages.shape[2]) < turns_of(batch)[:, :, None]]
    return tuple(advantages.reshape(-1).tolist())


def _turn_rewards(group: RolloutGroup, penalises: bool) -> list[list[float]]:
    """Returns [G][turns], the environment's reward for each turn of a trajectory; 0.0 where no such reward counts."""
    rewards: list[list[float]] = []
    for rollout in group.rollouts:
        completion = rollout.completion
        if completion.trajectory is UNSET or (penalises and completion.is_truncated):
            rewards.append([0.0] * len(completion.spans))
        else:
            rewards.append([turn.reward for turn in completion.trajectory.turns])
    return rewards


def _returns(turn_rewards: list[float], reward: float) -> list[float]:
    """Returns [turns], a trajectory's reward less the rewards of the turns before each of its turns."""
    returns = [reward]
    for turn in range(1, len(turn_rewards)):
        # Negative: what was given before turn k is taken off.
        earlier = [-turn_reward for turn_reward in turn_rewards[:turn]]
        # Taken off the whole, and not summed over later turns: scorers and stages gave theirs to the whole.
        returns.append(round(math.fsum([reward, *earlier]), DECIMALS))
    return returns
