"""Advantages of groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumer.gradient.advantages.estimators import (
    ADVANTAGES,
    centred_deviation,
    group_advantages,
    penalised_advantages,
)
from consumer.gradient.advantages.group_relative import (
    centred_rewards,
    grpo_advantages,
    rloo_advantages,
    shuffled_rewards,
)
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.kinds import ADVANTAGE_KINDS
from onbeat.loop.sampled import equal_groups


def test_every_advantage_of_the_spec_is_in_the_family() -> None:
    assert set(ADVANTAGES) == set(ADVANTAGE_KINDS)
    for name, kind in ADVANTAGE_KINDS.items():
        deviation = ADVANTAGES[name].late_deviation([0.5, -0.5, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], 1e-4)
        assert (deviation != 1.0) == kind.is_scaled_late


def test_advantages_are_the_rewards_in_units_of_the_unbiased_deviation() -> None:
    advantages = grpo_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), epsilon=1e-4)
    assert advantages.dtype == np.float64
    assert advantages[0].tolist() == pytest.approx([0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001])


@settings(deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_group_of_equal_rewards_has_exactly_no_advantage(reward: float, size: int) -> None:
    rewards = np.full((1, size), reward)
    assert grpo_advantages(rewards, epsilon=1e-12).tolist() == [[0.0] * size]
    for advantages in (centred_rewards, rloo_advantages):
        assert advantages(rewards).tolist() == [[0.0] * size]
    assert equal_groups(rewards).tolist() == [True]


def test_dr_grpo_takes_the_mean_off_and_rloo_the_mean_of_the_others() -> None:
    rewards = np.array([[1.0, 0.0, 0.5], [3.0, 3.0, 0.0]])
    assert centred_rewards(rewards).tolist() == [[0.5, -0.5, 0.0], [1.0, 1.0, -2.0]]
    assert rloo_advantages(rewards).tolist() == [[0.75, -0.75, 0.0], [1.5, 1.5, -3.0]]


def test_reinforce_divides_by_the_deviation_of_the_whole_iteration() -> None:
    batches = [np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[4.0, 0.0], [0.0, 1.0]])]
    centred = np.concatenate([centred_rewards(rewards) for rewards in batches])
    assert centred.tolist() == [[0.5, -0.5], [0.0, 0.0], [2.0, -2.0], [-0.5, 0.5]]
    deviation = centred_deviation(centred.reshape(-1).tolist(), [], 1e-4)
    assert deviation == pytest.approx(centred.std(ddof=1) + 1e-4, rel=1e-15)


def test_the_spec_chooses_the_advantage() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0]])
    chosen = {
        name: group_advantages(rewards, AlgorithmSpec(advantage=name))[0, 0]
        for name in ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
    }
    expected = {"grpo": 0.75 / 0.5001, "dr_grpo": 0.75, "rloo": 1.0, "reinforce++_baseline": 0.75}
    assert chosen == pytest.approx(expected)
    assert group_advantages(rewards, AlgorithmSpec(advantage_epsilon=0.5))[0, 0] == 0.75


def test_shuffling_keeps_each_groups_rewards_and_depends_on_seed_and_batch_alone() -> None:
    rewards = np.arange(32.0).reshape(2, 16)
    shuffled = shuffled_rewards(rewards, seed=7, batch_id="3/train/1")
    assert np.array_equal(np.sort(shuffled, axis=1), rewards)
    assert not np.array_equal(shuffled, rewards)
    assert np.array_equal(shuffled, shuffled_rewards(rewards, seed=7, batch_id="3/train/1"))
    assert not np.array_equal(shuffled, shuffled_rewards(rewards, seed=7, batch_id="3/train/2"))
    assert not np.array_equal(shuffled, shuffled_rewards(rewards, seed=8, batch_id="3/train/1"))


@pytest.mark.parametrize("beta", [1e-4, 1e-2, 1.0])
def test_a_penalty_counts_by_its_weight_also_where_the_rewards_of_a_group_are_equal(beta: float) -> None:
    """Over the deviation of both, this all-correct group had advantages of 1.22, 0.0 and -1.22 for every beta."""
    divergences = np.array([[0.0, 1.0, 2.0]])
    for name in ("grpo", "dr_grpo"):
        algorithm = AlgorithmSpec(advantage=name, kl_coefficient=beta, kl_placement="reward")
        advantages = penalised_advantages(np.ones((1, 3)), beta * divergences, algorithm)
        assert advantages[0].tolist() == pytest.approx([beta, 0.0, -beta], rel=1e-9, abs=1e-15)


def test_the_deviation_is_that_of_the_rewards_alone() -> None:
    rewards, penalties = np.array([[1.0, 0.0, 0.0, 0.0]]), np.array([[0.3, 0.1, 0.2, 0.2]])
    algorithm = AlgorithmSpec(kl_coefficient=0.1, kl_placement="reward")
    expected = grpo_advantages(rewards, epsilon=1e-4) - (penalties - 0.2)
    assert penalised_advantages(rewards, penalties, algorithm)[0].tolist() == pytest.approx(expected[0].tolist())
    algorithm = AlgorithmSpec(advantage="rloo", kl_coefficient=0.1, kl_placement="reward")
    assert penalised_advantages(rewards, penalties, algorithm).tolist() == rloo_advantages(rewards - penalties).tolist()
