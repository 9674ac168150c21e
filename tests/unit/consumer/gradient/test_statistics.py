"""Numbers of an iteration."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from consumer.gradient.advantages.estimators import batch_rewards
from consumer.gradient.statistics import (
    BatchStats,
    IterationNumbers,
    Mismatch,
    Scaling,
    counts_by_lag,
    iteration_numbers,
    iteration_scaling,
    joined,
    mean_over_updates,
    measure_mismatch,
)
from consumer.gradient.terms import entropy, policy, reference_kl
from consumer.gradient.terms import value as value_term
from consumer.gradient.terms.base import LossSpec
from consumer.gradient.terms.table import terms_of
from contracts.errors import ContractViolation
from contracts.events import IterationMetrics
from contracts.spec.algorithm import AlgorithmSpec
from tests.builders import batch_of, rollout, rollout_batch

TERMS = terms_of(LossSpec(algorithm=AlgorithmSpec(kl_coefficient=0.1), measures_entropy=True))


def stats(index: int, **changes: object) -> BatchStats:
    batch = rollout_batch(seed=index, batch_id=f"0/train/{index}", rewards=(0.0, 0.1, 0.7))
    return dataclasses.replace(BatchStats.of(batch, batch_rewards(batch)), **changes)  # type: ignore[arg-type]


def test_a_batch_is_measured_by_its_rewards_lengths_and_groups() -> None:
    batch = batch_of(
        [([5], [rollout([1, 2, 3], 1.0), rollout([1], 0.0)]), ([6], [rollout([1, 2], 0.5), rollout([4, 4], 0.5)])]
    )
    batch = replace(batch, groups=(batch.groups[0], replace(batch.groups[1], num_resamples=2)))
    measured = BatchStats.of(batch, batch_rewards(batch))
    assert measured.rewards == (1.0, 0.0, 0.5, 0.5)
    assert measured.component_scores == {"exact": (1.0, 0.0, 0.5, 0.5)}
    assert (measured.num_groups, measured.num_equal_groups, measured.num_resamples) == (2, 1, 2)
    assert (measured.num_tokens, measured.longest_response_tokens, measured.num_truncated) == (8, 3, 0)


def test_a_group_of_one_has_nothing_to_be_equal_to() -> None:
    batch = batch_of([([5], [rollout([1], 1.0)]), ([6], [rollout([2], 1.0)])])
    assert BatchStats.of(batch, batch_rewards(batch)).num_equal_groups == 0


@pytest.mark.parametrize("value", [0.3, -0.7, 12.3, 1e3])
def test_equal_returns_have_no_variance_to_explain(value: float) -> None:
    def metrics_of(returns: NDArray[np.floating]) -> dict[str, float]:
        sums = {
            value_term.VALUED_TOKENS: 4000.0,
            value_term.ERROR_SQUARES: 0.4,
            value_term.RETURNS: float(returns.sum()),
            value_term.RETURN_SQUARES: float(np.square(returns).sum()),
        }
        terms = terms_of(LossSpec(algorithm=AlgorithmSpec(advantage="gae")))
        return iteration_numbers([stats(0, term_sums=sums)], scaling=Scaling(count=1), terms=terms).loss_metrics

    returns = np.full(4000, value)
    assert "explained_variance" not in metrics_of(returns)
    apart = returns + 1e-3 * np.arange(4000)
    explained = metrics_of(apart)["explained_variance"]
    assert explained == pytest.approx(1.0 - 1e-4 / apart.var(), rel=1e-6)


def test_mismatch_is_measured_over_unmasked_tokens() -> None:
    trainer = torch.tensor([[-1.0, -2.0], [-3.0, 100.0]])
    generator = torch.tensor([[-1.0, -1.5], [-3.0, 0.0]])
    mismatch = measure_mismatch(trainer, generator, torch.tensor([[True, True], [True, False]]))
    rho = math.exp(-0.5)
    assert (mismatch.num_tokens, mismatch.largest) == (3, 0.5)
    assert mismatch.k3_sum == pytest.approx(rho + 0.5 - 1.0)
    assert mismatch.rho_sum == pytest.approx(2.0 + rho)
    assert mismatch.rho_square_sum == pytest.approx(2.0 + rho**2)


def test_generator_logprobs_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ContractViolation, match="generator_logprobs"):
        measure_mismatch(torch.zeros(1, 1), torch.tensor([[math.nan]]), torch.tensor([[True]]))


def test_numbers_of_an_iteration_by_hand() -> None:
    first = BatchStats(
        batch_id="0/train/0",
        rewards=(1.0, 0.0),
        component_scores={"exact": (1.0, 0.0), "of_some": (1.0,)},
        source_rewards={"sums": (1.0, 0.0)},
        num_groups=1,
        num_equal_groups=0,
        num_resamples=3,
        num_tokens=6,
        longest_response_tokens=4,
        num_truncated=1,
        loss_sum=-0.4,
        surprise_sum=1.75,
        advantages=(0.5, -0.5),
        term_sums={
            policy.CLIPPED_LOW: 1.0,
            policy.CLIPPED_HIGH: 2.0,
            policy.CAN_CLIP: 1.0,
            policy.CORRECTED: 2.0,
            entropy.ENTROPY: 1.5,
            entropy.ENTROPY_TOKENS: 6.0,
            reference_kl.REFERENCE_K3: 0.6,
        },
        mismatch=Mismatch(num_tokens=6, k3_sum=0.3, largest=0.2, rho_sum=6.0, rho_square_sum=12.0),
    )
    second = dataclasses.replace(
        first,
        batch_id="0/train/1",
        rewards=(0.0, 0.0),
        component_scores={"exact": (0.0, 0.0)},
        num_equal_groups=1,
        num_resamples=1,
        num_tokens=2,
        longest_response_tokens=1,
        num_truncated=0,
        loss_sum=0.0,
        surprise_sum=0.25,
        advantages=(0.0, 0.0),
        term_sums={},
        mismatch=Mismatch(),
    )
    numbers = iteration_numbers([second, first], scaling=Scaling(count=4), terms=TERMS)
    assert numbers.num_batches == 2
    assert (numbers.num_completions, numbers.num_tokens) == (4, 8)
    assert (numbers.reward_mean, numbers.reward_std) == (0.25, 0.5)
    assert numbers.reward_components == {"exact": 0.25, "of_some": 1.0}
    assert numbers.source_rewards == {"sums": 0.5}
    assert (numbers.zero_advantage_share, numbers.num_resamples) == (0.5, 4)
    assert (numbers.response_tokens_mean, numbers.response_tokens_max) == (2.0, 4)
    assert numbers.truncated_share == 0.25
    assert numbers.loss == pytest.approx(-0.1)
    assert numbers.loss_metrics == {
        "clip_share": 3 / 8,
        "clip_low_share": 1 / 8,
        "clip_high_share": 2 / 8,
        "corrected_share": 2 / 6,
        "kl_to_reference": pytest.approx(0.1),
        "entropy_trained_tokens": 1.5 / 6,
    }
    assert (numbers.advantage_mean, numbers.advantage_std, numbers.advantage_max) == (0.0, math.sqrt(0.5 / 3), 0.5)
    assert numbers.entropy == 2.0 / 8
    assert (numbers.mismatch_k3, numbers.mismatch_max) == (pytest.approx(0.05), 0.2)
    assert numbers.effective_sample_share == 36.0 / (6 * 12.0)


@pytest.mark.parametrize(
    ("algorithm", "divisor"),
    [
        ({"loss": "grpo"}, 16),
        ({"loss": "gspo"}, 16),
        ({"loss": "dr_grpo"}, 16),
        ({"loss": "dapo"}, 30),
        ({"loss": "cispo"}, 30),
        ({"loss": "bnpo"}, 2),
        ({"advantage": "reinforce++_baseline", "loss": "grpo"}, 16 * (math.sqrt(6.0 / 15) + 1e-4)),
        ({"advantage": "reinforce++_baseline", "advantage_epsilon": 0.5, "loss": "dapo"}, 30 * (math.sqrt(0.4) + 0.5)),
    ],
)
def test_the_divisor_counts_what_the_loss_says(algorithm: dict[str, Any], divisor: float) -> None:
    advantages = [(1.0, -1.0) + (0.0,) * 6, (1.0, -1.0, 1.0, -1.0) + (0.0,) * 4]
    batches = [stats(index, num_tokens=10 * (index + 1), advantages=advantages[index]) for index in range(2)]
    assert sum(len(batch.rewards) for batch in batches) == 16
    scaling = iteration_scaling(batches, AlgorithmSpec(**algorithm))
    assert scaling.divisor == pytest.approx(divisor, rel=1e-15)
    assert iteration_scaling(batches[::-1], AlgorithmSpec(**algorithm)) == scaling


def test_numbers_do_not_depend_on_the_order_of_arrival() -> None:
    batches = [
        stats(index, loss_sum=0.1 * index, term_sums={reference_kl.REFERENCE_K3: 0.7**index}) for index in range(6)
    ]
    expected = iteration_numbers(batches, scaling=Scaling(count=48), terms=TERMS)
    for seed in range(5):
        random.Random(seed).shuffle(batches)
        assert iteration_numbers(batches, scaling=Scaling(count=48), terms=TERMS) == expected


def test_numbers_that_each_update_has_are_means_and_the_others_are_those_of_the_rollouts() -> None:
    of_rollouts = Mismatch(num_tokens=4, k3_sum=0.4, largest=0.2, rho_sum=4.0, rho_square_sum=4.0)

    def of_step(number: int, *, can_clip: bool) -> IterationNumbers:
        sums = {
            policy.CLIPPED_LOW: float(number),
            policy.CAN_CLIP: float(can_clip),
            reference_kl.REFERENCE_K3: 0.4 * number,
        }
        batch = stats(0, loss_sum=8.0 * number, term_sums=sums, mismatch=of_rollouts)
        return iteration_numbers([batch], scaling=Scaling(count=8), terms=TERMS)

    first = of_step(0, can_clip=False)
    second = of_step(3, can_clip=True)
    share = 3 / stats(0).num_tokens
    numbers = mean_over_updates(first, [first, second], terms=TERMS)
    assert numbers.loss == 1.5
    # Only the steps that can clip have a share.
    assert numbers.loss_metrics == {
        "clip_share": share,
        "clip_low_share": share,
        "clip_high_share": 0.0,
        "corrected_share": 0.0,
        "kl_to_reference": pytest.approx(0.15),
    }
    assert dataclasses.replace(numbers, loss=0.0, loss_metrics=first.loss_metrics) == first
    assert mean_over_updates(second, [second], terms=TERMS) == second
    both = [of_step(0, can_clip=True), second]
    assert mean_over_updates(first, both, terms=TERMS).loss_metrics["clip_share"] == share / 2
    assert mean_over_updates(first, [first], terms=TERMS).loss_metrics["clip_share"] == 0.0


def test_the_entropy_is_of_every_sampled_token_whether_its_row_teaches_or_not() -> None:
    batch = batch_of(
        [
            ([5], [rollout([1, 2], 1.0, logprobs=[-0.5, -1.5]), rollout([1], 0.0, logprobs=[-1.0])]),
            ([6], [rollout([1], 1.0, logprobs=[-4.0]), rollout([2], 1.0, logprobs=[-3.0])]),
        ]
    )
    measured = BatchStats.of(batch, batch_rewards(batch))
    assert measured.surprise_sum == 10.0
    numbers = iteration_numbers([measured], scaling=Scaling(count=4), terms=TERMS)
    assert numbers.entropy == 2.0
    assert "entropy_trained_tokens" not in numbers.loss_metrics


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_prob_that_is_not_finite_is_refused_also_where_nothing_teaches(bad: float) -> None:
    batch = batch_of([([6], [rollout([1], 1.0, logprobs=[bad]), rollout([2], 1.0)])])
    with pytest.raises(ContractViolation, match="generator_logprobs"):
        BatchStats.of(batch, batch_rewards(batch))


def test_an_iteration_that_teaches_nothing_has_numbers_too() -> None:
    numbers = iteration_numbers([stats(0)], scaling=Scaling(count=8), terms=TERMS)
    assert (numbers.loss, numbers.mismatch_k3, numbers.effective_sample_share) == (0.0, 0.0, 1.0)


def test_every_number_is_a_field_of_the_iterations_metrics() -> None:
    names = {field.name for field in dataclasses.fields(IterationNumbers)}
    assert names <= set(IterationMetrics.__struct_fields__)


def test_batches_are_counted_by_their_lag_and_a_job_without_one_has_no_counts() -> None:
    versions = (7, 5, 7, 6, 5, 5)
    batches = [rollout_batch(iteration=7, policy_version=version) for version in versions]
    measured = [BatchStats.of(batch, batch_rewards(batch)) for batch in batches]
    assert [stats.lag for stats in measured] == [0, 2, 0, 1, 2, 2]
    assert counts_by_lag(measured, max_policy_lag=3) == (2, 1, 3, 0)
    assert counts_by_lag(measured[:1], max_policy_lag=0) == ()


def test_the_effective_share_of_sequences_is_that_of_products_however_large_they_are() -> None:
    log_ratios = torch.tensor([[0.1, 0.2, 0.0], [-0.3, 0.05, 0.4]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    gap = measure_mismatch(log_ratios, torch.zeros(2, 3), mask)
    weights = [math.exp(0.3), math.exp(0.15)]
    assert gap.log_weights == pytest.approx((0.3, 0.15))
    assert gap.effective_sequence_share == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    far = dataclasses.replace(gap, log_weights=(5000.0, 5000.0, -5000.0))
    assert far.effective_sequence_share == pytest.approx(2 / 3)
    shares = {joined(order).effective_sequence_share for order in ([gap, far], [far, gap])}
    assert len(shares) == 1
    assert Mismatch().effective_sequence_share == 1.0
