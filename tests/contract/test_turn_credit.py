"""Credit by turn: each turn's advantage is its equation, and so is the gradient of every loss that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from consumer.gradient.advantages.estimators import batch_advantages, batch_rewards
from consumer.gradient.assembly import make_learner
from consumer.model.policy import Policy
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from tests.builders import batch_of, tiny_model_folder
from tests.contract.test_streamed_gradient import iteration_of, relative_error
from tests.contract.test_streamed_losses import OFF, OFF_EQUATION, equation_gradient, models
from tests.contract.test_trajectories import LAYOUTS, gradient_of
from tests.contract.test_updates import gradient_of_responses, moved_from, responses_of, two_updates
from tests.loss_equations import Equation
from tests.trajectories import ENVIRONMENT, MAX_SAMPLED_TOKENS, as_one_turn, environment_spec, played, played_iteration

TURN: dict[str, Any] = {"credit": "turn"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss": "grpo"}, {"loss": "grpo"}),
    "grpo, off-policy": (OFF, OFF_EQUATION),
    "dr_grpo": ({"loss": "dr_grpo", "advantage": "dr_grpo"}, {"loss": "dr_grpo", "advantage": "dr_grpo"}),
    "dapo, rloo": ({"loss": "dapo", "advantage": "rloo"}, {"loss": "dapo", "advantage": "rloo", "eps_high": 0.28}),
    "bnpo": ({"loss": "bnpo"}, {"loss": "bnpo"}),
    "gspo": ({"loss": "gspo"} | OFF, {"loss": "gspo"} | OFF_EQUATION),
    "cispo": ({"loss": "cispo"} | OFF, {"loss": "cispo"} | OFF_EQUATION),
    "KL in the loss and entropy": (
        {"loss": "dapo", "kl_coefficient": 0.1, "kl_estimator": "k2", "entropy_coefficient": 0.02},
        {"loss": "dapo", "beta": 0.1, "kl": "k2", "alpha": 0.02, "eps_high": 0.28},
    ),
    "tis": ({"correction": "tis"}, {"correction": "tis", "w_high": 2.0}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Policy, Policy]:
    return models(tmp_path_factory.mktemp("models"), float64=True)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_equation(pair: tuple[Policy, Policy], case: str) -> None:
    algorithm, equation = CASES[case]
    batches = played_iteration()
    expected = equation_gradient(pair, batches, Equation(**equation, of_turns=True, budget=MAX_SAMPLED_TOKENS))
    layout = list(LAYOUTS.values())[list(CASES).index(case) % len(LAYOUTS)]
    gradients = gradient_of(pair, batches, algorithm | TURN, **layout)
    assert relative_error(gradients, expected) < 1e-8
    assert relative_error(gradients, gradient_of(pair, batches, algorithm, **layout)) > 1e-3


def test_the_second_update_is_its_equation_at_the_moved_weights(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=True), played_iteration()
    before = responses_of(pair, batches)
    narrow = {"clip_low": 0.02, "clip_high": 0.03}
    _, gradients, _ = two_updates(pair, batches, {"loss": "dapo"} | narrow | TURN, environment=ENVIRONMENT)
    moved = moved_from(before, responses_of(pair, batches))
    equation = {"loss": "dapo", "eps_low": 0.02, "eps_high": 0.03, "of_turns": True}
    assert relative_error(gradients, gradient_of_responses(pair, moved, equation)) < 1e-8


@pytest.mark.parametrize("loss", ["dapo", "cispo"])
def test_trajectories_of_one_turn_have_the_bits_of_credit_by_trajectory(tmp_path: Path, loss: str) -> None:
    pair, batches = models(tmp_path, float64=False), [as_one_turn(batch) for batch in iteration_of()]
    whole = gradient_of(pair, batches, {"loss": loss})
    by_turn = gradient_of(pair, batches, {"loss": loss} | TURN)
    assert all(torch.equal(by_turn[name], whole[name]) for name in whole)


def advantages_of(batch: RolloutBatch, advantage: str = "dr_grpo", **changes: Any) -> np.ndarray:
    spec = environment_spec(algorithm={"advantage": advantage} | TURN | changes)
    return batch_advantages(batch, batch_rewards(batch), spec.algorithm)


def test_a_turn_is_credited_with_what_came_after_it_and_a_scorer_with_the_last() -> None:
    first = played([[7], [8], [9]], [[4], [4]], turn_rewards=[1.0, 0.0, 0.5], terminal=2.0)
    other = played([[7], [8]], [[4]], turn_rewards=[0.0, 0.5], terminal=0.0)
    found = advantages_of(batch_of([([5], [first, other])]))
    # Returns 3.5, 2.5, 2.5 and 0.5, 0.5: the third turn of the one has no other to be compared with.
    assert found.tolist() == [[[1.5, 1.0, 0.0], [-1.5, -1.0, 0.0]]]


def test_of_a_trajectory_that_was_cut_the_stated_reward_alone_counts_for_each_turn() -> None:
    """Earlier rewards aren't taken off it once more: what its turns had been given is not part of it."""
    cut = played([[7], [8], [9]], [[4], [4]], turn_rewards=[1.0, 0.5, 0.0], stop="truncated")
    other = played([[7], [8]], [[4]], turn_rewards=[0.5, 0.5])
    stated = batch_of([([5], [msgspec.structs.replace(cut, reward=-1.0), other])])
    found = advantages_of(stated, on_truncated="penalise", truncated_reward=-1.0)
    # Returns -1, -1, -1 and 1, 0.5; where nothing is penalised 1.5, 0.5, 0 and 1, 0.5.
    assert found.tolist() == [[[-1.0, -0.75, 0.0], [1.0, 0.75, 0.0]]]
    assert advantages_of(batch_of([([5], [cut, other])])).tolist() == [[[0.25, 0.0, 0.0], [-0.25, 0.0, 0.0]]]


def test_returns_that_are_equal_sums_of_other_rewards_teach_nothing() -> None:
    one = played([[7], [8]], [[4]], turn_rewards=[0.1, 0.2])
    other = played([[7], [9]], [[4]], turn_rewards=[0.3, 0.2])
    (turns,) = advantages_of(batch_of([([5], [one, other])]), "grpo")
    assert turns[:, 1].tolist() == [0.0, 0.0]
    assert (turns[:, 0] != 0.0).all()


def test_the_cost_counts_the_rows_that_went_through_and_the_numbers_each_turn(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    equal = [played([[7], [8]], [[4, 4]], turn_rewards=rewards) for rewards in ([0.0, 1.0], [1.0, 0.0])]
    nothing = [played([[7]], turn_rewards=[1.0])] * 2
    batch = batch_of([([5, 6], equal), ([5], nothing)])
    learner = make_learner(StackSettings(model_root=str(tmp_path)), environment_spec(algorithm=TURN))
    stats = learner.train(batch).stats
    # Rewards of the first group are equal, its second turns are not.
    assert stats.num_equal_groups == 2
    assert stats.trained_rows == (0, 1)
    assert stats.cost.num_tokens == 2 + 4 + 4
    assert [advantage != 0.0 for advantage in stats.advantages] == [False, True, False, True, False, False]
