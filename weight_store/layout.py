"""What a version will hold, known before any of its values: a writer needs it to give each tensor its place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.errors import ContractViolation, OnbeatError


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One tensor, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_items * self.dtype.itemsize


Layout = Mapping[str, TensorLayout]
"""In the order in which the tensors are expected: those that come together share a file."""


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:
    """Of tensors that are at hand, sharded ones included: their shape is that of the whole."""
    return {name: TensorLayout(dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()}


def total_bytes(layout: Layout) -> int:
    return sum(one.num_bytes for one in layout.values())


def check_layout(layout: Layout, name: str, tensor: Tensor) -> None:
    """Raises ContractViolation for a tensor that is not the one that was announced."""
    expected = layout.get(name)
    if expected is None or (expected.dtype, expected.shape) != (tensor.dtype, tuple(tensor.shape)):
        raise ContractViolation(f"{tensor.dtype} {list(tensor.shape)} was not announced: {expected}", field=name)


def published_dtype(layout: Layout) -> str:
    """Of the parameters, as a manifest says it; buffers may have others."""
    for one in layout.values():
        if one.dtype.is_floating_point:
            return dtype_name(one)
    raise OnbeatError("a policy without floating-point tensors", field="weights")


def dtype_name(tensor: Tensor | TensorLayout) -> str:
    """ "float32", as a manifest says it."""
    return str(tensor.dtype).removeprefix("torch.")


def split_into_shards(layout: Layout, *, shard_bytes: int) -> list[dict[str, TensorLayout]]:
    """Tensors in order, a new shard where the next one would not fit; a larger tensor has a shard of its own."""
    shards: list[dict[str, TensorLayout]] = [{}]
    used = 0
    for name, one in layout.items():
        if shards[-1] and used + one.num_bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = one
        used += one.num_bytes
    return shards
