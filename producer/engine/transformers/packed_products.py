"""The matrix products of a step, by weights that are packed once a version instead of at every product.

    rows [N, K] ─ Product: one linear layer, or several that read the same rows ─▶ [N, their outputs]

Kernels read a weight in an order of their own, and functional.linear has them bring it into that order at each call: a
third of a step of 16 rows. Here a copy in that order is made when a version's first step needs it.

float32    [K, outputs]: MKL reads it as it is. Where it sums up K in other blocks than it does for functional.linear,
           the product is cut in two. A way that gives functional.linear's bytes is looked for at each number of rows;
           where there is none, the layer stays with functional.linear. By oneDNN (`model.matmul`): its own order.
bfloat16   oneDNN's own order. Its kernels for AMX sum up K in blocks that depend on the number of rows, so that a row's
           bits would be its company's. So a product has 64 rows at a time there, as the engine's fingerprint says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from onbeat.base import kernels
from onbeat.base.kernels import OneDnnLinear
from onbeat.data.sampled_values import FEWEST_ROWS
from onbeat.weights.model_folder import Float32Head
from producer.engine.fingerprint import block_rows

ROWS = 8
"""A step has a multiple of so many rows: few numbers of rows, so that all of them can be compared."""
MOST_ROWS = 64
"""Packed weights gain little at more rows: a product's own arithmetic grows, and packing doesn't."""
SMALL = 2**20
MOST_ROWS_OF_SMALL: dict[type[nn.Linear], int] = {nn.Linear: 128, OneDnnLinear: 256}
"""They gain more where a layer has at most SMALL weights, and are compared fast there, by oneDNN for twice as many."""
MKL_BLOCK = 384
"""MKL cuts K into blocks of so many for functional.linear."""
PERIOD = 65_537
"""Numbers that weights are made up of for a comparison: a prime, so that no two rows are alike."""

Parts = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The facts that the bits of a product depend on, besides its numbers."""

    dtype: torch.dtype
    num_inputs: int
    outputs: tuple[int, ...]
    """How many outputs each layer has."""
    has_bias: bool
    kind: type[nn.Linear]
    """nn.Linear, or what stands for it."""

    @classmethod
    def of(cls, layers: Sequence[nn.Linear]) -> Shape:
        first = layers[0]
        outputs = tuple(layer.out_features for layer in layers)
        return cls(
            dtype=_dtype(first),
            num_inputs=first.in_features,
            outputs=outputs,
            has_bias=first.bias is not None,
            kind=OneDnnLinear if type(first) is OneDnnLinear else nn.Linear,
        )

    @property
    def num_weights(self) -> int:
        return self.num_inputs * sum(self.outputs)

    def with_numbers(self) -> tuple[list[nn.Linear], Tensor]:
        """Layers of this shape and as many rows [N, K] as are compared, with the same numbers on each machine."""
        numbers = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0))
        layers: list[nn.Linear] = []
        for num_outputs in self.outputs:
            layer = self.kind(self.num_inputs, num_outputs, bias=self.has_bias, dtype=self.dtype, device="meta")
            layer.weight = _parameter(numbers, self.dtype, num_outputs, self.num_inputs)
            if self.has_bias:
                layer.bias = _parameter(numbers, self.dtype, num_outputs)
            layers.append(layer)
        rows = _parameter(numbers.flip(0), self.dtype, MOST_ROWS_OF_SMALL[self.kind], self.num_inputs)
        return layers, rows


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way in which the products of a shape are computed from packed weights."""

    pack: Callable[[Tensor], Parts]
    """[outputs, K] weights → what `multiply` takes."""
    multiply: Callable[[Tensor, Parts, Tensor | None], Tensor]
    """[N, K] rows, packed weights, bias → [N, outputs]"""
    numbers_of_rows: range
    """The numbers of rows at which it gives functional.linear's bytes; at others functional.linear is called."""


class Packing:
    """The ways of the products of one step on this machine, within a limit for the memory of packed weights."""

    def __init__(self, most_bytes: int, ways: dict[Shape, Way | None] | None = None) -> None:
        self._most_bytes = most_bytes
        self._bytes_left = most_bytes
        self._ways = {} if ways is None else ways

    def way_of(self, layers: Sequence[nn.Linear]) -> Way | None:
        """Returns the way for a product by these layers, if there is one and memory for it is left, which is taken
        then.
        """
        shape = Shape.of(layers)
        num_bytes = shape.num_weights * shape.dtype.itemsize
        if num_bytes > self._bytes_left or layers[0].weight.device.type != "cpu":
            return None
        if shape not in self._ways:
            self._ways[shape] = _proven_way(shape)
        way = self._ways[shape]
        if way is not None:
            self._bytes_left -= num_bytes
        return way

    @property
    def packed_bytes(self) -> int:
        """The memory of what is packed for the step."""
        return self._most_bytes - self._bytes_left

    def again(self) -> Packing:
        """Returns the same ways and limit for another step."""
        return Packing(self._most_bytes, self._ways)


class Product:
    """Rows, of its dtype, times the weights of one layer, or of several that read the same rows, side by side."""

    def __init__(self, layers: Sequence[nn.Linear], packing: Packing) -> None:
        self._layers = tuple(layers)
        self.dtype = _dtype(layers[0])
        self._block_rows = block_rows(self.dtype, layers[0].weight.device.type)
        self._way = packing.way_of(layers)
        self.release()

    def release(self) -> None:
        """Lets the packed weights go: the next product packs those that the layers have by then."""
        self._packed: tuple[Parts, Tensor | None] | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Multiplies [N, K] rows → [N, outputs of all layers]."""
        if self._block_rows and rows.shape[0] != self._block_rows:
            return self._by_blocks(rows)
        way = self._way
        # Not len(): a tensor's is a call of Python's.
        if way is None or rows.shape[0] not in way.numbers_of_rows:
            return linear(rows, self._layers)
        if self._packed is None:
            self._packed = pack(way, self._layers)
        return way.multiply(rows, *self._packed)

    def _by_blocks(self, rows: Tensor) -> Tensor:
        """Multiplies [N, K] rows in blocks of `block_rows`, the last one filled up with zeros."""
        num_rows = rows.shape[0]
        # -n modulo the block: the rows up to the next multiple.
        missing = -num_rows % self._block_rows
        if missing:
            # Zeros below the last row; pad() counts axes from the last one: (left, right, above, below).
            rows = functional.pad(rows, (0, 0, 0, missing))
        if num_rows <= self._block_rows:
            return self(rows)[:num_rows]
        return torch.cat([self(block) for block in rows.split(self._block_rows)])[:num_rows]


def pack(way: Way, layers: Sequence[nn.Linear]) -> tuple[Parts, Tensor | None]:
    """Packs weights and bias, next to each other where there are several layers."""
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    dtype = _dtype(layers[0])
    bias = None if biases[0] is None else _side_by_side(biases).to(dtype)
    return way.pack(_side_by_side(weights).to(dtype)), bias


def linear(rows: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Computes a Product's result by functional.linear: the reference that packed products are compared with."""
    products = [layer.forward(rows) for layer in layers]
    return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _dtype(layer: nn.Linear) -> torch.dtype:
    """Returns the dtype of a layer's product."""
    if isinstance(layer, Float32Head):
        return torch.float32
    return layer.weight.dtype


def _proven_way(shape: Shape) -> Way | None:
    """Finds the first way whose products of made-up numbers have functional.linear's bytes at each number of rows."""
    layers, rows = shape.with_numbers()
    for way in _ways(shape):
        try:
            if _gives_the_same(way, layers, rows):
                return way
        except (RuntimeError, AttributeError):
            # This build of torch has no such operation, or not for this CPU.
            continue
    return None


def _ways(shape: Shape) -> list[Way]:
    """Lists the ways to try for a shape, in this order."""
    of_block = block_rows(shape.dtype, "cpu")
    most = MOST_ROWS_OF_SMALL[shape.kind] if shape.num_weights <= SMALL else MOST_ROWS
    rows = range(of_block, of_block + 1) if of_block else range(FEWEST_ROWS, most + 1, ROWS)
    if of_block or shape.kind is OneDnnLinear:
        return [Way(pack=_in_the_order_of_onednn, multiply=_multiply_by_onednn, numbers_of_rows=rows)]
    if shape.dtype != torch.float32 or not torch.backends.mkl.is_available():
        return []
    last_block = (shape.num_inputs - 1) // MKL_BLOCK * MKL_BLOCK
    cuts = (shape.num_inputs, last_block) if last_block else (shape.num_inputs,)
    return [Way(pack=_transposed(cut), multiply=_multiply, numbers_of_rows=rows) for cut in cuts]


def _gives_the_same(way: Way, layers: Sequence[nn.Linear], rows: Tensor) -> bool:
    """Returns True where a way's products have functional.linear's bytes at each number of rows that it is for."""
    packed = pack(way, layers)
    return all(
        same_bytes(way.multiply(rows[:number], *packed), linear(rows[:number], layers))
        for number in way.numbers_of_rows
    )


def same_bytes(actual: Tensor, expected: Tensor) -> bool:
    """Returns True for equal numbers and zeros of equal sign; NaN is unequal to itself."""
    return bool(torch.equal(actual, expected)) and bool(torch.equal(actual.signbit(), expected.signbit()))


def _transposed(cut: int) -> Callable[[Tensor], Parts]:
    """Makes a function from [outputs, K] to [cut, outputs], and [K - cut, outputs] where that isn't empty."""

    def pack(weight: Tensor) -> Parts:
        turned = weight.t().contiguous()
        return (turned,) if cut == len(turned) else (turned[:cut], turned[cut:])

    return pack


def _multiply(rows: Tensor, packed: Parts, bias: Tensor | None) -> Tensor:
    """Multiplies rows [N, K] by transposed weights, cut along K, in the order in which MKL sums the whole product."""
    # Sums go in this order: the bias, the first `cut` inputs, the inputs after them. Another order has other bits.
    first = packed[0]
    begin = rows if len(packed) == 1 else rows[:, : first.shape[0]]
    product = torch.mm(begin, first) if bias is None else torch.addmm(bias, begin, first)
    if len(packed) == 1:
        return product
    return product.addmm_(rows[:, first.shape[0] :], packed[1])


def _in_the_order_of_onednn(weight: Tensor) -> Parts:
    """Packs weights in the order in which oneDNN reads them."""
    return (kernels.pack(weight),)


def _multiply_by_onednn(rows: Tensor, packed: Parts, bias: Tensor | None) -> Tensor:
    """Multiplies rows [N, K] by weights in oneDNN's order."""
    return kernels.multiply(rows, packed[0], bias)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """Joins weights [outputs, K], or biases [outputs], along the outputs."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _parameter(numbers: Tensor, dtype: torch.dtype, *shape: int) -> nn.Parameter:
    """Makes a tensor that repeats the numbers."""
    size = 1
    for length in shape:
        size *= length
    repeated = numbers.to(dtype).repeat(-(-size // len(numbers)))[:size].view(shape)
    return nn.Parameter(repeated, requires_grad=False)
