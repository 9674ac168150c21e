"""Kept sets on the wire: the tokens that truncated sampling (top_p, top_k, min_p) left in the draw, for each drawn one.

A set is its ids, ascending, as the gaps between them, and a 0 after them. The first gap counts from -1, so that no gap
is 0; each is a LEB128 number, the low seven bits first:

    {2, 3, 300}            3, 1, 297, 0        03 01 A9 02 00
    the whole vocabulary   0                   00

Equal sets are equal bytes, and sets one after another are the bytes of each one after another
(docs/decisions/0002-sampling.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from contracts.errors import ContractViolation

Ids = NDArray[np.int64]
BITS = 7
"""Bits of a number in each of its bytes. The eighth, the highest, is set where another byte of the number follows."""
LOW_BITS = (1 << BITS) - 1
"""The mask of these bits: 0x7F."""
MOST_BYTES = 5
"""Bytes of the largest gap: ids are int32."""


def pack_kept_sets(sets: Sequence[NDArray[np.integer]]) -> bytes:
    """[S] sets, ascending ids each, none for the whole vocabulary → bytes."""
    ends = np.cumsum([len(ids) for ids in sets], dtype=np.int64)
    ids = np.concatenate([*sets, np.empty(0, dtype=np.int64)]).astype(np.int64)
    # The gaps run over the borders of sets. At the first id of each set the gap is to the last id of the set before,
    # and may be negative: it is replaced by the gap from -1, which is the id + 1.
    gaps = np.diff(ids, prepend=-1)
    # A set begins where the one before ends. An empty set begins where its successor does, and none begins after all
    # ids.
    firsts = np.unique(np.concatenate(([0], ends)))
    firsts = firsts[firsts < len(ids)]
    gaps[firsts] = ids[firsts] + 1
    # A 0 after each set. `ends` has the place of an empty set twice, so that it gets its own 0, right after the other.
    numbers = np.insert(gaps, ends, 0)
    # Bytes of each number: one, and one more for each shift by 7, 14, 21 and 28 bits that leaves something of it.
    lengths = 1 + ((numbers[:, None] >> (BITS * np.arange(1, MOST_BYTES))) > 0).sum(axis=1)
    starts = np.cumsum(lengths) - lengths
    # Writes the first byte of all numbers, then the second of those that have one, and so on.
    packed = np.empty(int(lengths.sum()), dtype=np.uint8)
    for place in range(int(lengths.max(initial=0))):
        has = lengths > place
        low_bits = (numbers[has] >> (BITS * place)) & LOW_BITS
        goes_on = (lengths[has] > place + 1).astype(np.int64) << BITS
        packed[starts[has] + place] = low_bits | goes_on
    return packed.tobytes()


def unpack_kept_sets(data: bytes) -> tuple[Ids, Ids]:
    """Bytes → the ids of all sets, one after another, and [S] how many each has. Raises ContractViolation."""
    packed = np.frombuffer(data, dtype=np.uint8)
    # Of the bytes of a number only the last one has its highest bit clear; the next number begins after it.
    is_last = packed < (1 << BITS)
    starts = np.flatnonzero(np.concatenate(([True], is_last[:-1])))
    lengths = np.diff(starts, append=len(packed))
    # A last byte of 0 proves that the data ends with a whole number (its highest bit is clear) and with a whole set
    # (each has a 0 after it).
    if not len(packed) or packed[-1] or lengths.max() > MOST_BYTES:
        raise ContractViolation("are no kept sets, each with a 0 after it", field="kept_sets")
    # Place of each byte in its number, the lowest bits first.
    places = np.arange(len(packed)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((packed & LOW_BITS).astype(np.int64) << (BITS * places), starts)
    is_end = numbers == 0
    counts = np.diff(np.flatnonzero(is_end), prepend=-1) - 1
    # A sum of gaps over all sets, less the sum before the set, is the id + 1: the first gap of a set counts from -1.
    sums = np.cumsum(numbers)
    before = np.concatenate(([0], sums[is_end][:-1]))
    return sums[~is_end] - np.repeat(before, counts) - 1, counts
