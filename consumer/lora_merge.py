"""W' = W + scaling · B A, by a rule that gives the same bits wherever it is computed.

    product[i, j] = ((b_i0 a_0j + b_i1 a_1j) + b_i2 a_2j) + …       in float32, from the first rank to the last
    W'[i, j]      = W[i, j] + scaling · product[i, j]               in float32, then rounded to W's dtype

Every operation is elementwise and rounded by itself, as IEEE 754 says. A matrix product would be some times faster,
but its order of summation, and with it the last bits, depend on the library, the threads and the device; a trainer and
a generator that differed there could not agree on a digest.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK_ITEMS = 1 << 16
"""Items worked on at a time: three float32 temporaries stay in a core's cache."""


def merge_into(target: Tensor, weight: Tensor, *, lora_a: Tensor, lora_b: Tensor, scaling: float) -> None:
    """Writes the merged weight into `target`.

    target, weight: [out, in] of one dtype; `target` may be `weight`. lora_a: float32 [r, in]; lora_b: float32 [out, r].
    """
    rows_at_once = max(1, CHUNK_ITEMS // weight.shape[1])
    for start in range(0, weight.shape[0], rows_at_once):
        rows = slice(start, start + rows_at_once)
        product = lora_b[rows, :1] * lora_a[:1]
        term = torch.empty_like(product)
        for rank in range(1, lora_a.shape[0]):
            torch.mul(lora_b[rows, rank : rank + 1], lora_a[rank : rank + 1], out=term)
            product.add_(term)
        target[rows] = product.mul_(scaling).add_(weight[rows].float())
