"""The memory of an optimizer step, as bytes a parameter: what is live beyond weights, masters, moments and sums."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consumer.gradient.accumulation import CHUNK_ITEMS, ExactAccumulator
from consumer.gradient.optimizer import GROUP_BYTES, PolicyOptimizer
from contracts.spec.job import OptimizerSpec

LAYERS = 40
LAYER_ITEMS = 1 << 16
NUM_PARAMETERS = LAYERS * LAYER_ITEMS


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that torch makes while it is entered, for as long as each of them lives."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        if storage._cdata in before or storage._cdata in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen.add(storage._cdata)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._let_go, storage._cdata, num_bytes)

    def _let_go(self, storage: int, num_bytes: int) -> None:
        self._seen.discard(storage)
        self.live -= num_bytes


def layers() -> dict[str, nn.Parameter]:
    """A bfloat16 model of equal layers."""
    draw = torch.Generator().manual_seed(0)
    return {
        f"layers.{number}": nn.Parameter(torch.randn(LAYER_ITEMS, generator=draw).bfloat16())
        for number in range(LAYERS)
    }


def summed(named: Mapping[str, nn.Parameter], optimizer: PolicyOptimizer) -> ExactAccumulator:
    accumulator = ExactAccumulator(named, targets=optimizer.stepped, max_micro_batches=1)
    draw = torch.Generator().manual_seed(1)
    for parameter in named.values():
        parameter.grad = torch.randn(parameter.shape, generator=draw).bfloat16()
    accumulator.add()
    return accumulator


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e9])
def test_a_step_needs_the_gradients_of_one_group_and_not_of_the_model(
    monkeypatch: pytest.MonkeyPatch, max_grad_norm: float
) -> None:
    """Two groups' at most, the first one's and the one that is due, where all of them are 4 bytes a parameter."""
    group_bytes = 4 * 2 * LAYER_ITEMS
    monkeypatch.setitem(GROUP_BYTES, "cpu", group_bytes)
    named = layers()
    optimizer = PolicyOptimizer(named, OptimizerSpec(max_grad_norm=max_grad_norm))
    warm = summed(named, optimizer)
    optimizer.step(1e-3, warm.gradients(1.0))  # makes the moments
    warm.finish()
    accumulator = summed(named, optimizer)
    with LiveBytes() as counted:
        optimizer.step(1e-3, accumulator.gradients(1.0))
    # A chunk of float64 stands beside them while a gradient is made of its sums.
    assert group_bytes <= counted.peak <= 2.5 * group_bytes + 8 * CHUNK_ITEMS["cpu"]
    assert counted.peak / NUM_PARAMETERS < 0.6
    assert counted.live < group_bytes
