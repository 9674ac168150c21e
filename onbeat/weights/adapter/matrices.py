"""Versions that are LoRA matrices on a base: how their tensors are called, and which weight each pair belongs to.

    base_model.model.{layer}.lora_A.weight  [r, in]  ─┐
    base_model.model.{layer}.lora_B.weight  [out, r] ─┴─ merge ─▶ {layer}.weight  [out, in]

The names are those of peft's files, which vLLM reads as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.errors import WeightsRejected
from onbeat.weights.publication import TensorSink

PREFIX = "base_model.model."
A_END = ".lora_A.weight"
B_END = ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class AdapterSource:
    """Where a publisher of adapters takes them from; all tensors are of floats."""

    scaling: float
    """alpha / rank."""
    matrices: Callable[[], Mapping[str, Tensor]]
    """The trained A and B of each layer, which its merged weight is made of when it is added."""
    base: Callable[[TensorSink], None]
    """Gives a sink the weights without adapters, which never change; each once, as ranks that share them gather it."""


@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """One layer's adapter."""

    lora_a: Tensor
    """float32 [r, in]."""
    lora_b: Tensor
    """float32 [out, r]."""


def matrix_names(layer: str) -> tuple[str, str]:
    """The names of a layer's A and of its B."""
    return f"{PREFIX}{layer}{A_END}", f"{PREFIX}{layer}{B_END}"


def matrices_of(weight: str) -> tuple[str, str]:
    """`matrix_names` of the layer that has this weight."""
    return matrix_names(weight.removesuffix(".weight"))


def layers_of(tensors: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]) -> dict[str, LayerMatrices]:
    """Pairs the matrices: weight name → its adapter. Raises WeightsRejected for what is no adapter of `weights`."""
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
