"""Draws that are exact and reproducible, at the edges that a frequency test does not see."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.errors import BatchFailed
from contracts.sampling import SamplingParams
from producer.engine.sampling import choose, completion_uniforms, draw, log_distribution, sample
from tests.builders import prompt_batch

LARGEST = np.nextafter(1.0, 0.0)
"""The largest uniform below 1."""


def params(**changes: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, **changes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logprobs = np.array([[-np.inf, np.log(0.5), -np.inf, np.log(0.5), -np.inf]])
    assert draw(logprobs, np.array([uniform]))[0] in (1, 3)


def test_the_whole_unit_interval_maps_to_tokens_in_order() -> None:
    logprobs = np.log(np.array([[0.25, 0.25, 0.5]] * 5))
    assert draw(logprobs, np.array([0.0, 0.24, 0.25, 0.5, LARGEST])).tolist() == [0, 0, 1, 2, 2]


def test_top_k_keeps_exactly_k_and_the_lower_id_on_a_tie() -> None:
    logprobs = log_distribution(np.array([[1.0, 3.0, 1.0, 1.0]], dtype=np.float32), params(top_k=2))
    assert np.isfinite(logprobs).tolist() == [[True, True, False, False]]
    assert np.exp(logprobs).sum() == pytest.approx(1.0)


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_at_least_one() -> None:
    logits = np.log(np.array([[0.1, 0.6, 0.3]]))
    assert np.isfinite(log_distribution(logits, params(top_p=0.65))).tolist() == [[False, True, True]]
    only = log_distribution(logits, params(top_p=0.01))
    assert only.tolist() == [[-np.inf, 0.0, -np.inf]]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = np.log(np.array([[0.4, 0.3, 0.2, 0.1]]))
    both = log_distribution(logits, params(top_k=2, top_p=0.55))
    assert both[0, 0] == 0.0, "0.4 of the remaining 0.7 is enough"


def test_min_p_keeps_what_has_so_large_a_share_of_the_most_likely_one_after_the_temperature() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1], [0.97, 0.01, 0.01, 0.01]]))
    kept = np.isfinite(log_distribution(logits, params(min_p=0.5))).tolist()
    assert kept == [[True, True, False, False], [True, False, False, False]]
    assert np.isfinite(log_distribution(logits, params(min_p=0.24, temperature=0.5))).sum(axis=-1).tolist() == [2, 1]
    assert np.isfinite(log_distribution(logits, params(min_p=1.0))).sum(axis=-1).tolist() == [1, 1]
    assert np.isfinite(log_distribution(logits, params(min_p=0.1, top_k=3))).sum(axis=-1).tolist() == [3, 1]


def test_temperature_divides_the_logits_and_zero_reports_temperature_one() -> None:
    logits = np.array([[0.0, 2.0]])
    assert np.diff(log_distribution(logits, params(temperature=0.5)))[0, 0] == pytest.approx(4.0)
    assert np.array_equal(log_distribution(logits, params(temperature=0.0)), log_distribution(logits, params()))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_fail_the_batch(bad: float) -> None:
    with pytest.raises(BatchFailed, match="not finite"):
        log_distribution(np.array([[0.0, bad]]), params())


def test_uniforms_belong_to_the_completion_and_not_to_the_composition_of_its_batch() -> None:
    both = prompt_batch([[5], [6]], group_size=3)
    second = prompt_batch([[5], [6]], group_size=2)
    alone = type(second)(
        **{name: getattr(second, name) for name in second.__struct_fields__}
        | {"prompts": second.prompts[1:], "batch_id": "0/train/9"}
    )
    assert np.array_equal(completion_uniforms(both)[3:5], completion_uniforms(alone))
    assert completion_uniforms(both).shape == (6, 5)


def test_uniforms_are_pinned_so_that_a_library_update_cannot_change_a_run_unseen() -> None:
    first = completion_uniforms(prompt_batch([[5]], group_size=1, seed=42))[0, :2]
    assert first.tolist() == [0.42067291447098976, 0.10995077187083535]


def test_a_block_of_rows_is_drawn_as_the_whole() -> None:
    random = np.random.default_rng(0)
    logits = random.normal(scale=3.0, size=(50, 9000)).astype(np.float32)
    uniforms = random.random(50)
    for sampling in (params(), params(temperature=0.7, top_p=0.9), params(temperature=0.0)):
        drawn = sample(logits, sampling, uniforms)
        whole = log_distribution(logits, sampling)
        assert np.array_equal(drawn.tokens, choose(whole, sampling, uniforms))
        assert np.array_equal(drawn.logprobs, whole[np.arange(50), drawn.tokens])
        assert bool(drawn.kept) == (sampling.top_p < 1.0)
        for row, ids in drawn.kept.items():
            assert ids.tolist() == np.flatnonzero(whole[row] > -np.inf).tolist()


def test_a_draw_from_the_whole_vocabulary_keeps_an_empty_set() -> None:
    drawn = sample(np.log(np.array([[0.5, 0.3, 0.2], [0.98, 0.01, 0.01]])), params(top_p=0.99), np.zeros(2))
    assert {row: ids.tolist() for row, ids in drawn.kept.items()} == {0: [], 1: [0, 1]}
