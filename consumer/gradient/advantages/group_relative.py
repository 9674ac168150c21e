"""Advantages that compare a reward with those of its group: GRPO, Dr. GRPO and RLOO, and what Lite PPO has of it.

    grpo      A_i = (r_i - mean) / (std + epsilon)           Shao et al., arXiv 2402.03300, section 4.1.2
    dr_grpo   A_i = r_i - mean                               Liu et al., arXiv 2503.20783, section 3.2
    rloo      A_i = r_i - 1/(G - 1) sum_{j != i} r_j         Ahmadian et al., arXiv 2402.14740
                  = G/(G - 1) (r_i - mean)
    lite_ppo  A_i = (r_i - mean) / (std + epsilon), std of the iteration's rewards     Liu et al., arXiv 2508.08221

dr_grpo leaves the deviation out: a prompt that is nearly always solved, or nearly never, weighs no more than another.
rloo's baseline doesn't contain the reward that it is taken off, so it is unbiased.

Every function takes rewards [k, G], a row for each group with G >= 2, and returns [k, G] in float64: the loss rounds
once, to its own dtype.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from onbeat.loop.sampled import equal_groups

Rewards = NDArray[np.float64]
"""[k, G], a row for each group."""


def grpo_advantages(rewards: Rewards, *, epsilon: float) -> Rewards:
    """Divides by the unbiased std (ddof = 1) of the group."""
    return centred_rewards(rewards) / (rewards.std(axis=1, ddof=1, keepdims=True) + epsilon)


def rloo_advantages(rewards: Rewards) -> Rewards:
    """Subtracts the mean of the other samples."""
    size = rewards.shape[1]
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
    key = hashlib.blake2b(f"{seed}/{batch_id}/shuffled_rewards".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return random.permuted(rewards, axis=1)
