"""Versions that are LoRA matrices on a base: how their tensors are called, and how they become the weights.

base_model.model.{layer}.lora_A.weight  [r, in]  ─┐
base_model.model.{layer}.lora_B.weight  [out, r] ─┴─ lora_merge ─▶ {layer}.weight  [out, in]

The names are those of peft's files, which vLLM reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.errors import WeightsRejected
from weight_store.adapter.merge import merge_into

PREFIX = "base_model.model."
A_END = ".lora_A.weight"
B_END = ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """Where a publisher of adapters takes them from; all of it float tensors."""

    scaling: float
    """alpha / rank."""
    matrices: Callable[[], Mapping[str, Tensor]]
    """A and B of each layer: the trained ones, which a layer's merged weight is made of when it is added."""
    base: Callable[[], Mapping[str, Tensor]]
    """The weights without them, which never change."""


@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """One layer's adapter."""

    lora_a: Tensor
    """float32 [r, in]."""
    lora_b: Tensor
    """float32 [out, r]."""


class AdaptedBase:
    """A copy of the base's weights of those layers that have adapters: each version is merged into them anew."""

    def __init__(self, base_digest: str, weights: Mapping[str, Tensor]) -> None:
        self._digest = base_digest
        self._weights = {name: weight.clone() for name, weight in weights.items()}

    def fits(self, base_digest: str, layers: Mapping[str, LayerMatrices]) -> bool:
        return self._digest == base_digest and self._weights.keys() == layers.keys()

    def merge(self, name: str, matrices: LayerMatrices, *, scaling: float, target: Tensor) -> None:
        """Writes one layer's weight."""
        merge_into(target, self._weights[name], lora_a=matrices.lora_a, lora_b=matrices.lora_b, scaling=scaling)


def matrix_names(layer: str) -> tuple[str, str]:
    """(of A, of B)."""
    return f"{PREFIX}{layer}{A_END}", f"{PREFIX}{layer}{B_END}"


def matrices_of(weight: str) -> tuple[str, str]:
    """`matrix_names` of the layer that has this weight."""
    return matrix_names(weight.removesuffix(".weight"))


def layers_of(tensors: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]) -> dict[str, LayerMatrices]:
    """Weight name → its adapter. Raises WeightsRejected for what is not an adapter of one of `weights`."""
    layers: dict[str, LayerMatrices] = {}
    for name, lora_a in tensors.items():
        if not name.endswith(A_END):
            continue
        layer = name.removeprefix(PREFIX).removesuffix(A_END)
        weight, lora_b = weights.get(f"{layer}.weight"), tensors.get(matrix_names(layer)[1])
        if weight is None or lora_b is None or not _fit(weight, lora_a, lora_b):
            raise WeightsRejected(f"{name} is no adapter of this model")
        layers[f"{layer}.weight"] = LayerMatrices(lora_a=lora_a, lora_b=lora_b)
    if not layers or len(tensors) != 2 * len(layers):
        raise WeightsRejected(f"{len(tensors)} tensors are not {len(layers)} pairs of LoRA matrices")
    return layers


def _fit(weight: Tensor, lora_a: Tensor, lora_b: Tensor) -> bool:
    rank = lora_a.shape[0]
    shapes_fit = (tuple(lora_b.shape), tuple(lora_a.shape)) == ((weight.shape[0], rank), (rank, weight.shape[-1]))
    return weight.dim() == 2 and rank > 0 and shapes_fit and lora_a.dtype == lora_b.dtype == torch.float32
