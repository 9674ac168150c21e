"""W' = W + scaling · B A, by a rule that gives the same bits wherever it is computed.

A matrix product sums in an order of its own: that of the library, the threads, the device. A trainer and a generator
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

from torch import Tensor

CHUNK_ITEMS = 1 << 18
"""Items that are worked on at a time: the float64 temporaries stay small."""
EXACT_BITS = 53


def merge_into(
    target: Tensor, weight: Tensor, *, lora_a: Tensor, lora_b: Tensor, scaling: float, first_row: int = 0
) -> None:
    """Writes the merged weight into `target`.

    target, weight: [out, in] of one dtype, or the rows of both from `first_row` on; `target` may be `weight`.
    lora_a: float32 [r, in]; lora_b: float32 [out, r].
    """
    # A sum of r products of two numbers of `bits` bits has 2 · bits + ceil(log2 r) bits, 53 at most.
    bits = (EXACT_BITS - math.ceil(math.log2(lora_a.shape[0]))) // 2
    whole_a, exponent_a = _integers(lora_a, bits)
    whole_b, exponent_b = _integers(lora_b, bits)
    # A power of two times `scaling`: undoing both shifts rounds nothing.
    factor = math.ldexp(scaling, exponent_a + exponent_b - 2 * bits)
    rows_at_once = max(1, CHUNK_ITEMS // weight.shape[1])
    for start in range(0, weight.shape[0], rows_at_once):
        rows = slice(start, min(start + rows_at_once, weight.shape[0]))
        # [rows, r] @ [r, in]: exact in float64. Then each element is rounded by the product, the sum and the copy.
        product = whole_b[first_row + rows.start : first_row + rows.stop] @ whole_a
        target[rows] = product.mul_(factor).add_(weight[rows])


def _integers(matrix: Tensor, bits: int) -> tuple[Tensor, int]:
    """(float64 integers of at most `bits` bits, exponent): the matrix is about integers · 2**(exponent - bits)."""
    _, exponent = math.frexp(matrix.abs().max().item())
    return (matrix.double() * math.ldexp(1.0, bits - exponent)).round_(), exponent
