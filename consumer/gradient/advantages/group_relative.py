"""Rewards of a rollout batch, a row for each group."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def centred_rewards(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of its group. rewards: [k, G], G >= 2; answers [k, G].

    A group of equal rewards gives exactly 0.0, where a rounded mean would leave a residue that a division magnifies.
    """
    return np.where(equal_groups(rewards)[:, None], 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def equal_groups(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool [k]: groups whose rewards are all equal; they teach nothing."""
    return rewards.max(axis=1) == rewards.min(axis=1)


def shuffled_rewards(rewards: NDArray[np.float64], *, seed: int, batch_id: str) -> NDArray[np.float64]:
    """The negative control: each group's rewards in a random order of its own.

    The order depends on (seed, batch id) alone, so that a batch that is trained again is shuffled the same way (I7).
    """
    key = hashlib.blake2b(f"{seed}/{batch_id}/shuffled_rewards".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return random.permuted(rewards, axis=1)
