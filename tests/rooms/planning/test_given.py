"""Stated rates: the batches that follow from them, and the refusal of those that make no sense."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest

from contracts.encoding.wire import convert, encode
from contracts.errors import InvalidInput
from contracts.spec.job import JobSpec
from onbeat.planning.checks import check_machines, check_rates
from onbeat.planning.given import Rates, draw_length, given_costs
from onbeat.planning.pipeline.costs import Machines, batch_bytes
from tests.builders import job_spec, rollout_batch
from tests.rooms.planned import batch
from tests.trajectories import environment_spec

RATES: dict[str, Any] = {
    "generator": {"tokens_per_s": 80.0},
    "trainer": {"tokens_per_s": 40.0, "step_s": 0.5},
    "sync": {"publish_s": 0.25, "load_s": 0.125},
    "lengths": {"distribution": "equal", "mean": 5.0, "prompt_tokens": 5.0},
}


def rates(*changes: tuple[str, Any]) -> Rates:
    values = copy.deepcopy(RATES)
    for path, value in changes:
        table, key = path.split(".")
        values.setdefault(table, {})[key] = value
    return convert(values, Rates)


def spec(**changes: Any) -> JobSpec:
    """Batches of 2 prompts with 4 completions of up to 5 tokens."""
    return job_spec(**{"rollout__max_prompt_tokens": 8, **changes})


def test_a_batch_takes_a_step_for_each_token_of_its_longest_completion() -> None:
    found = given_costs(spec(), rates())
    # 8 rows at 80 tokens/s are 10 steps a second.
    assert {batch.generate_s for batch in found.training} == {0.5}
    assert {batch.num_tokens for batch in found.training} == {40}
    # A shared prompt goes through the trainer once for its group: 40 + 2 * 5 tokens.
    assert {batch.train_s for batch in found.training} == {50 / 40}
    assert {batch.train_s for batch in given_costs(spec(trainer__packing="padded"), rates()).training} == {80 / 40}
    assert {batch.generate_s for batch in found.evaluation} == {0.5}
    assert (found.steps[0].step_s, found.steps[0].publish_s, found.waits.load_s) == (0.5, 0.25, 0.125)


def test_an_engine_with_more_rows_has_longer_steps_at_the_same_rate() -> None:
    found = given_costs(spec(), rates(("generator.completions_at_once", 32)))
    assert {batch.generate_s for batch in found.training} == {2.0}


def test_lengths_follow_their_distribution_up_to_the_longest() -> None:
    wide = spec(rollout__sampling={"max_new_tokens": 1000})
    tailed = given_costs(
        wide, rates(("lengths.distribution", "lognormal"), ("lengths.mean", 100), ("lengths.sigma", 1))
    )
    tokens = [batch.num_tokens / 8 for batch in tailed.training]
    assert 90 < sum(tokens) / len(tokens) < 105  # what sampling cuts off is missing
    histogram = rates(("lengths.distribution", "histogram"), ("lengths.tokens", (2, 4)), ("lengths.shares", (1.0, 0.0)))
    assert {batch.num_tokens for batch in given_costs(spec(), histogram).training} == {16}
    assert draw_length(rates(("lengths.mean", 400.0)).lengths, Random(0), longest=5) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("generator.tokens_per_s", 0.0), "generator.tokens_per_s: expected `float` > 0.0"),
        (("generator.tokens_per_s", float("nan")), "generator.tokens_per_s: expected `float` > 0.0"),
        (("trainer.tokens_per_s", float("inf")), "trainer.tokens_per_s: expected `float` <= 1000000000000.0"),
        (("trainer.step_s", -1.0), "trainer.step_s: expected `float` >= 0.0"),
        (("sync.load_s", 1e9), "sync.load_s: expected `float` <= 604800.0"),
        (("sync.load_s", 3000.0), "a generator gives a load up after timeouts.generation_s = 1800 s"),
        (("sync.publish_s", 4000.0), "a whole iteration has timeouts.iteration_s = 3600 s"),
        (("generator.tokens_per_s", 0.01), "a generator gives a batch up after timeouts.generation_s"),
        (("generator.completions_at_once", -1), "generator.completions_at_once: expected `int` >= 0"),
        (("lengths.mean", 6.0), "is 6 tokens, sampling ends at rollout.sampling.max_new_tokens = 5"),
        (("lengths.mean", 0.0), "is 0 tokens"),
        (("lengths.prompt_tokens", 9.0), "a prompt has up to rollout.max_prompt_tokens = 8"),
        (("lengths.sigma", 1.0), "has no effect where all lengths are equal"),
        (("lengths.distribution", "normal"), "`normal` is no distribution"),
        (("hardware.parameters", -1.0), "hardware.parameters: expected `float` >= 0.0"),
    ],
)
def test_a_rate_that_makes_no_sense_is_named_with_the_reason(change: tuple[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_rates(spec(), rates(change))
    assert words in str(refused.value)


def test_a_job_with_an_environment_reads_observations_too_and_says_what_is_not_in_the_rates() -> None:
    played = environment_spec(rollout__max_prompt_tokens=8, trainer__packing="padded")
    observed = rates(("lengths.mean", 12.0), ("lengths.observation_tokens", 7.0))
    check_rates(played, observed)
    with_observations, without = given_costs(played, observed), given_costs(played, rates(("lengths.mean", 12.0)))
    assert without.train_s * (12 + 5 + 7) == pytest.approx(with_observations.train_s * (12 + 5))
    assert with_observations.training[0].num_tokens == without.training[0].num_tokens == 8 * 12
    assert with_observations.warnings
    assert not given_costs(spec(), rates()).warnings
    with pytest.raises(InvalidInput, match=r"is 16 tokens, sampling ends by environment\.max_turns .* = 15"):
        check_rates(played, rates(("lengths.mean", 16.0)))
    with pytest.raises(InvalidInput, match=r"lengths\.observation_tokens: is 7, an environment adds up to 0"):
        check_rates(spec(), rates(("lengths.observation_tokens", 7.0)))


def test_rates_above_what_the_hardware_can_do_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"means an MFU of 2\.40"):
        check_rates(spec(), rates(("hardware.parameters", 1e9), ("hardware.rank_peak_flops", 1e11)))
    reading = (("hardware.parameters", 1e9), ("hardware.generator_bytes_per_s", 1e10))
    with pytest.raises(InvalidInput, match="8 rows have at most 40 tokens/s, since each step reads 2e"):
        check_rates(spec(), rates(*reading))
    check_rates(spec(), rates(("hardware.parameters", 1e8), ("hardware.rank_peak_flops", 1e11)))


@pytest.mark.parametrize(
    ("tokens", "shares", "words"),
    [
        ((), (), "0 lengths with 0 shares"),
        ((2, 3), (1.0,), "2 lengths with 1 shares"),
        ((2, 9), (0.5, 0.5), "has 9 tokens"),
        ((2, 3), (-1.0, 2.0), "are 0 or more"),
        ((2, 3), (0.0, 0.0), "are 0 or more"),
    ],
)
def test_a_histogram_has_a_share_for_each_length(tokens: tuple, shares: tuple, words: str) -> None:
    stated = rates(("lengths.distribution", "histogram"), ("lengths.tokens", tokens), ("lengths.shares", shares))
    with pytest.raises(InvalidInput, match=words):
        check_rates(spec(), stated)


def test_generators_that_would_never_have_a_batch_are_refused() -> None:
    check_machines(spec(), Machines(num_generators=8), most_open=2)
    with pytest.raises(InvalidInput, match="9 generators for 8 batches that are open at once: 1 would never have one"):
        check_machines(spec(), Machines(num_generators=9), most_open=2)
    with pytest.raises(InvalidInput, match="4 threads a process on 2 cores"):
        check_machines(spec(), Machines(num_cores=2, threads=4), most_open=1)


@pytest.mark.parametrize("tokens", [5, 200])
def test_the_bytes_of_a_batch_are_nearly_those_of_its_encoded_record(tokens: int) -> None:
    encoded = len(encode(rollout_batch(prompt_tokens=(8, 8), response_tokens=(tokens, tokens))))
    # Texts of builders are empty: here they would have four characters for each token.
    assert batch_bytes(spec(), batch(1.0, num_tokens=8 * tokens)) == pytest.approx(encoded + 4 * 8 * tokens, rel=0.1)
