"""`on_truncated = "mask"`: what was cut has no loss, and keeps its place in its group and in the divisor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.micro_step import train_micro_batch
from contracts.errors import InvalidInput
from contracts.rollouts import Rollout, RolloutBatch
from tests.builders import job_spec, judged_spec
from tests.contract.test_streamed_gradient import iteration_of, load, relative_error
from tests.contract.test_streamed_losses import CASES, equation_gradient, gradient_of, models
from tests.loss_equations import Equation
from tests.trajectories import played_iteration

MASK = {"on_truncated": "mask"}
MASKABLE = [case for case in CASES if "KL in the reward" not in case]


def cut(batch: RolloutBatch, *, every: int) -> RolloutBatch:
    """The batch with every so many of its completions cut at their longest."""

    def one(number: int, rollout: Rollout) -> Rollout:
        reason = "stop" if number % every else "length"
        return replace(rollout, completion=replace(rollout.completion, finish_reason=reason))

    groups = (
        replace(group, rollouts=tuple(one(number + place, rollout) for number, rollout in enumerate(group.rollouts)))
        for place, group in enumerate(batch.groups)
    )
    return replace(batch, groups=tuple(groups))


@pytest.mark.parametrize("case", MASKABLE)
def test_the_gradient_is_that_of_the_equation_without_the_losses_of_what_was_cut(tmp_path: Path, case: str) -> None:
    algorithm, equation = CASES[case]
    pair = models(tmp_path, float64=True)
    batches = [cut(batch, every=3) for batch in (*iteration_of(), *played_iteration())]
    expected = equation_gradient(pair, batches, Equation(**equation, masks_truncated=True))
    assert relative_error(gradient_of(pair, batches, algorithm | MASK), expected) < 1e-8
    assert relative_error(gradient_of(pair, batches, algorithm), expected) > 1e-3


def test_a_batch_that_was_cut_whole_teaches_nothing_and_goes_through_no_model(tmp_path: Path) -> None:
    policy, batch = load(tmp_path), cut(iteration_of()[1], every=1)
    accumulator = ExactAccumulator(policy.trained_parameters(), max_micro_batches=1)
    spec = job_spec(algorithm=MASK | {"entropy_coefficient": 0.1})
    stats, kept = train_micro_batch(policy, batch, reference=None, spec=spec, accumulator=accumulator)
    assert (stats.trained_rows, stats.loss_sum, kept) == ((), 0.0, None)
    assert any(stats.advantages)
    assert stats.num_tokens > 0
    critic, spec = policy.with_critic(), job_spec(algorithm=MASK | {"advantage": "gae"})
    accumulator = ExactAccumulator(critic.trained_parameters(), max_micro_batches=1)
    stats, kept = train_micro_batch(critic, batch, reference=None, spec=spec, accumulator=accumulator)
    assert (any(stats.advantages), stats.trained_rows, kept) == (False, (), None), "no value was asked for"


def test_left_out_it_is_the_score_and_a_kl_in_the_reward_is_refused(tmp_path: Path) -> None:
    pair, batches = models(tmp_path, float64=False), [cut(batch, every=2) for batch in iteration_of()]
    scored, plain = (gradient_of(pair, batches, algorithm) for algorithm in ({"on_truncated": "score"}, {}))
    assert all(torch.equal(scored[name], plain[name]) for name in plain)
    with pytest.raises(InvalidInput, match="on_truncated"):
        judged_spec(algorithm=MASK | {"kl_coefficient": 0.1, "kl_placement": "reward"})
