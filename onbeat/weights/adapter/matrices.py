"""Versions that are LoRA matrices on a base: how their tensors are called, and W' = W + scaling · B A.

    base_model.model.{layer}.lora_A.weight  [r, in]  ─┐
    base_model.model.{layer}.lora_B.weight  [out, r] ─┴─ merge ─▶ {layer}.weight  [out, in]

The names are those of peft's files, which vLLM reads as well. The merge gives the same bits wherever it is computed: a
matrix product sums in an order of its own, that of the library, the threads, the device, and a trainer and a generator
that differed in the last bit could not agree on a digest. So the factors are rounded to integers first, small enough
that each sum of products is below 2**53, and float64 holds every one of them exactly, in any order:

    bits     (53 - ceil(log2 r)) // 2                24 for r = 16: as many as float32 has
    A*       round(A · 2**(bits - exponent(A)))      exponent: the largest |A| is below 2**exponent
    B*       the same
    W'       W + scaling · 2**(exponent(A) + exponent(B) - 2 bits) · B* A*

The last line is elementwise in float64, each operation rounded by itself as IEEE 754 says, then rounded to W's dtype.
"""

from __future__ import annotations

import math
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
    """The source of an adapter version's base and matrices; all tensors are of floats.

    The trainer's policy creates it; AdapterPublisher reads it.
    """

    scaling: float
    """alpha / rank."""
    matrices: Callable[[], Mapping[str, Tensor]]
    """The trained A and B of each layer, which its merged weight is made of when it is added."""
    base: Callable[[TensorSink], None]
    """Gives a sink the weights without adapters, which never change; each once, as ranks that share them gather it."""


@dataclass(frozen=True, kw_only=True)
class LayerMatrices:
    """The adapter of one layer. `layers_of` creates it from a version's files; merges read it."""

    lora_a: Tensor
    """float32 [r, in]."""
    lora_b: Tensor
    """float32 [out, r]."""


def matrix_names(layer: str) -> tuple[str, str]:
    """Returns the names of a layer's A and of its B."""
    return f"{PREFIX}{layer}{A_END}", f"{PREFIX}{layer}{B_END}"


def matrices_of(weight: str) -> tuple[str, str]:
    """Returns `matrix_names` of the layer that has this weight."""
    return matrix_names(weight.removesuffix(".weight"))


def layers_of(tensors: Mapping[str, Tensor], *, weights: Mapping[str, Tensor]) -> dict[str, LayerMatrices]:
    """Pairs the matrices: weight name → its adapter. Raises WeightsRejected for what is no adapter of `weights`."""
    layers: dict[str, LayerMatrices] = {}
    for name, lora_a in tensors.items():
        if not name.endswith(A_END):
            continue
        layer = name.removeprefix(PREFIX).removesuffix(A_END)
        weight = weights.get(f"{layer}.weight")
        lora_b = tensors.get(matrix_names(layer)[1])
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


CHUNK_ITEMS = 1 << 18
"""Items that are worked on at a time: the float64 temporaries stay small."""
EXACT_BITS = 53


def merge_into(
    target: Tensor, weight: Tensor, *, lora_a: Tensor, lora_b: Tensor, scaling: float, first_row: int = 0
) -> None:
    """Writes the merged weight, weight + scaling · B · A, into `target`.

    Args:
        target: [out, in], or its rows from `first_row` on; it may be `weight`.
        weight: The base's weight, of the same shape and dtype.
        lora_a: float32 [r, in].
        lora_b: float32 [out, r].
        scaling: alpha / r, or alpha / √r.
        first_row: The row of the whole weight that `target` and `weight` begin with.
    """
    # A sum of r products of two numbers of `bits` bits has 2 · bits + ceil(log2 r) bits, 53 at most.
    bits = (EXACT_BITS - math.ceil(math.log2(lora_a.shape[0]))) // 2
    whole_a, exponent_a = _integers(lora_a, bits)
    whole_b, exponent_b = _integers(lora_b, bits)
    # A power of two times `scaling`: undoing both shifts rounds nothing.
    factor = math.ldexp(scaling, exponent_a + exponent_b - 2 * bits)
    # How rows are cut changes no bit: each element is made of its own row of B and column of A.
    rows_at_once = max(1, CHUNK_ITEMS // weight.shape[1])
    for start in range(0, weight.shape[0], rows_at_once):
        rows = slice(start, min(start + rows_at_once, weight.shape[0]))
        # [rows, r] @ [r, in]: exact in float64. Then each element is rounded by the product, the sum and the copy.
        product = whole_b[first_row + rows.start : first_row + rows.stop] @ whole_a
        target[rows] = product.mul_(factor).add_(weight[rows])


def _integers(matrix: Tensor, bits: int) -> tuple[Tensor, int]:
    """Rounds a matrix to integers over one common power of two.

    Returns:
        float64 integers of at most `bits` bits, and the exponent: the matrix is about integers · 2**(exponent - bits).
    """
    # max |x| = m · 2**exponent with 0.5 <= m < 1; of zeros the exponent is 0.
    _, exponent = math.frexp(matrix.abs().max().item())
    # A product with a power of two is exact; round_ takes halves to even, everywhere alike.
    return (matrix.double() * math.ldexp(1.0, bits - exponent)).round_(), exponent
