"""Draws that are exact and reproducible, at the edges that a frequency test does not see; on a device as on the host.

A device's are by torch on the CPU, and with TEST_DEVICE=cuda on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import BatchFailed
from contracts.sampling import SamplingParams
from onbeat.data.sampled_values import Contexts
from producer.engine.sampling import BLOCK, completion_uniforms, cumulative_sums, draw, log_distribution, sample
from tests.builders import DEVICE, prompt_batch

LARGEST = np.nextafter(1.0, 0.0)  # the largest uniform
SAMPLINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tempered": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.7, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
    "late": {"min_new_tokens": 2},
    "biased": {"logit_bias": {"0": 2.0, "5": -100.0}},
    "penalised": {"repetition_penalty": 1.3, "temperature": 0.7},
    "processed and cut": {"repetition_penalty": 0.7, "logit_bias": {"1": 2.0}, "min_new_tokens": 1, "top_k": 5},
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, **changes)


def on_device(logits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(logits).to(DEVICE)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("vocabulary", [7, BLOCK, BLOCK + 1, 70_000])
def test_tokens_sets_and_log_probs_of_a_device_are_the_hosts(
    name: str, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("producer.engine.sampling.DEVICE_BLOCK_ITEMS", 11 * vocabulary)
    random = np.random.default_rng(vocabulary)
    # Few values, so that several tokens tie at the edge of a set.
    logits = random.integers(-12, 12, (48, vocabulary)).astype(np.float32) / 4
    logits[:, 3] = -np.inf
    uniforms = random.random(48)
    uniforms[:2] = 0.0, LARGEST
    sampling, seen = params(**SAMPLINGS[name]), random.integers(0, vocabulary, (48, 9))
    contexts = Contexts(sampling=sampling, end_ids=np.array([2]), num_new=np.arange(48) % 4, seen=lambda row: seen[row])
    host, device = (sample(of, sampling, uniforms, contexts) for of in (logits, on_device(logits)))
    assert np.array_equal(device.tokens, host.tokens)
    assert np.abs(device.logprobs - host.logprobs).max() < 1e-12
    assert device.kept_ids.keys() == host.kept_ids.keys()
    assert all(np.array_equal(device.kept_ids[row], host.kept_ids[row]) for row in host.kept_ids)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = np.full((1, 3 * BLOCK), -np.inf, dtype=np.float32)
    logits[0, [BLOCK - 2, BLOCK + 3]] = 0.0
    for where in (logits, on_device(logits)):
        assert sample(where, params(), np.array([uniform])).tokens[0] in (BLOCK - 2, BLOCK + 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, "no finite one"])
def test_logits_that_are_not_finite_fail_the_batch(bad: Any) -> None:
    logits = np.zeros((2, 300), dtype=np.float32)
    logits[1, slice(None) if isinstance(bad, str) else 7] = -np.inf if isinstance(bad, str) else bad
    for where in (logits, on_device(logits)):
        with pytest.raises(BatchFailed, match="not finite"):
            sample(where, params(), np.array([0.5, 0.5]))


def test_sums_are_those_of_numpy_and_the_same_each_time() -> None:
    values = torch.rand(5, 3 * BLOCK * BLOCK + 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = cumulative_sums(values.to(DEVICE))
    assert np.allclose(found.cpu().numpy(), values.numpy().cumsum(axis=-1), rtol=1e-12)
    assert torch.equal(found, cumulative_sums(values.to(DEVICE)))


def test_the_whole_unit_interval_maps_to_tokens_in_order() -> None:
    logprobs = np.log(np.array([[0.25, 0.25, 0.5]] * 5))
    assert draw(logprobs, np.array([0.0, 0.24, 0.25, 0.5, LARGEST])).tolist() == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("settings", "probabilities", "kept"),
    [
        ({"top_k": 2}, [0.1, 0.7, 0.1, 0.1], [0, 1]),  # the lower id on a tie
        ({"top_p": 0.65}, [0.1, 0.6, 0.3], [1, 2]),
        ({"top_p": 0.01}, [0.1, 0.6, 0.3], [1]),
        ({"top_k": 2, "top_p": 0.55}, [0.4, 0.3, 0.2, 0.1], [0]),  # 0.4 of the remaining 0.7 is enough
        ({"min_p": 0.5}, [0.5, 0.25, 0.15, 0.1], [0, 1]),
        ({"min_p": 0.24, "temperature": 0.5}, [0.5, 0.25, 0.15, 0.1], [0, 1]),
        ({"min_p": 1.0}, [0.5, 0.25, 0.15, 0.1], [0]),
        ({"temperature": 0.0}, [0.9, 0.1], [0, 1]),  # whose log-probs are those of temperature 1
    ],
)
def test_what_is_left_is_drawn_from_by_its_probabilities(
    settings: dict[str, Any], probabilities: list[float], kept: list[int]
) -> None:
    powers = np.array(probabilities)[kept] ** (1.0 / (settings.get("temperature") or 1.0))
    found = np.exp(log_distribution(np.log(np.array([probabilities])), params(**settings)))[0]
    assert np.flatnonzero(found).tolist() == kept
    assert found[kept] == pytest.approx(powers / powers.sum())


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


def test_a_draw_from_the_whole_vocabulary_keeps_an_empty_set() -> None:
    drawn = sample(np.log(np.array([[0.5, 0.3, 0.2], [0.98, 0.01, 0.01]])), params(top_p=0.99), np.zeros(2))
    assert {row: ids.tolist() for row, ids in drawn.kept_ids.items()} == {0: [], 1: [0, 1]}
