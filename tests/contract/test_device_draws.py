"""Draws where the logits are (producer/engine/device_draws.py) beside the host's: the same tokens, sets and log-probs.

They run by torch on the CPU, and with TEST_DEVICE=cuda on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contracts.errors import BatchFailed
from contracts.sampling import SamplingParams
from producer.engine.device_draws import BLOCK, cumulative_sums
from producer.engine.sampling import sample
from tests.builders import DEVICE

LARGEST = np.nextafter(1.0, 0.0)
"""The largest uniform below 1."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tempered": {"temperature": 0.3},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 1.7, "top_k": 300, "top_p": 0.9, "min_p": 0.001},
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=4, **changes)


def on_device(logits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(logits).to(DEVICE)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("vocabulary", [7, BLOCK, BLOCK + 1, 70_000])
def test_tokens_sets_and_log_probs_are_the_hosts(name: str, vocabulary: int) -> None:
    random = np.random.default_rng(vocabulary)
    # Few values, so that several tokens tie at the edge of a set.
    logits = random.integers(-12, 12, (48, vocabulary)).astype(np.float32) / 4
    logits[:, 3] = -np.inf
    uniforms = random.random(48)
    uniforms[:2] = 0.0, LARGEST
    sampling = params(**SAMPLINGS[name])
    host, device = sample(logits, sampling, uniforms), sample(on_device(logits), sampling, uniforms)
    assert np.array_equal(device.tokens, host.tokens)
    assert np.abs(device.logprobs - host.logprobs).max() < 1e-12
    assert device.kept.keys() == host.kept.keys()
    assert all(np.array_equal(device.kept[row], host.kept[row]) for row in host.kept)


def test_rows_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(0).normal(size=(9, 1000)).astype(np.float32)
    uniforms = np.random.default_rng(1).random(9)
    together = sample(on_device(logits), params(top_p=0.5), uniforms)
    monkeypatch.setattr("producer.engine.sampling.DEVICE_BLOCK_ITEMS", 2500)
    by_twos = sample(on_device(logits), params(top_p=0.5), uniforms)
    assert np.array_equal(by_twos.tokens, together.tokens)
    assert np.abs(by_twos.logprobs - together.logprobs).max() < 1e-14
    assert all(np.array_equal(by_twos.kept[row], together.kept[row]) for row in range(9))


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    logits = np.full((1, 3 * BLOCK), -np.inf, dtype=np.float32)
    logits[0, [BLOCK - 2, BLOCK + 3]] = 0.0
    assert sample(on_device(logits), params(), np.array([uniform])).tokens[0] in (BLOCK - 2, BLOCK + 3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, "no finite one"])
def test_logits_that_are_not_finite_fail_the_batch(bad: Any) -> None:
    logits = np.zeros((2, 300), dtype=np.float32)
    logits[1, slice(None) if isinstance(bad, str) else 7] = -np.inf if isinstance(bad, str) else bad
    with pytest.raises(BatchFailed, match="not finite"):
        sample(on_device(logits), params(), np.array([0.5, 0.5]))


def test_sums_are_those_of_numpy_and_the_same_each_time() -> None:
    values = torch.rand(5, 3 * BLOCK * BLOCK + 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = cumulative_sums(values.to(DEVICE))
    assert np.allclose(found.cpu().numpy(), values.numpy().cumsum(axis=-1), rtol=1e-12)
    assert torch.equal(found, cumulative_sums(values.to(DEVICE)))
