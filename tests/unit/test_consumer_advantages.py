"""Advantages of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumer.advantages import equal_groups, grpo_advantages, shuffled_rewards


def test_advantages_are_the_rewards_in_units_of_the_unbiased_deviation() -> None:
    advantages = grpo_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), epsilon=1e-4)
    assert advantages.dtype == np.float64
    assert advantages[0].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_group_of_equal_rewards_has_exactly_no_advantage(reward: float, size: int) -> None:
    rewards = np.full((1, size), reward)
    assert grpo_advantages(rewards, epsilon=1e-12).tolist() == [[0.0] * size]
    assert equal_groups(rewards).tolist() == [True]


def test_shuffling_keeps_each_groups_rewards_and_depends_on_seed_and_batch_alone() -> None:
    rewards = np.arange(32.0).reshape(2, 16)
    shuffled = shuffled_rewards(rewards, seed=7, batch_id="3/train/1")
    assert np.array_equal(np.sort(shuffled, axis=1), rewards)
    assert not np.array_equal(shuffled, rewards)
    assert np.array_equal(shuffled, shuffled_rewards(rewards, seed=7, batch_id="3/train/1"))
    assert not np.array_equal(shuffled, shuffled_rewards(rewards, seed=7, batch_id="3/train/2"))
    assert not np.array_equal(shuffled, shuffled_rewards(rewards, seed=8, batch_id="3/train/1"))
