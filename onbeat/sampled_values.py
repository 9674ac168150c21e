"""The arithmetic that generators sample with, for those who compute its very bits again: rows alone, in float64.

A row's numbers are a function of that row, however rows are cut into blocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLUMNS = 16
"""Attention adds up a row's columns by vectors of so many numbers: a part of a vector would be added up otherwise. So
the columns that a step reads are a multiple of it, and any larger multiple gives the same bits."""
FEWEST_ROWS = 16
"""Products of fewer rows take other kernels, whose last bits depend on how many they are. And a multiple of it leaves
no part of a vector over, which functions like SiLU compute by other instructions."""

BLOCK_ITEMS = 65_536
"""Log-probs that are worked on at a time, half a megabyte: in the core's cache they are several times as fast."""


def scaled(logits: NDArray[np.floating], temperature: float) -> NDArray[np.float64]:
    """Returns [N, V] logits / temperature, less the largest of each row, which is 0 then; temperature 0 stands for 1.

    A row that is not finite stays so.
    """
    values = logits.astype(np.float64)
    # softmax(x) = softmax(x - max x), whose exponentials lie in [0, 1] and can't overflow.
    values -= values.max(axis=-1, keepdims=True)
    if temperature not in (0.0, 1.0):
        values /= temperature
    return values


def normalised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Makes log-probs of `scaled` [N, V], in their place: -inf, which was filtered out, stays -inf."""
    # log p = x - log sum exp x, over what is left. The largest is 0: the sum is 1 or more, and its logarithm finite.
    values -= np.log(np.exp(values).sum(axis=-1, keepdims=True))
    return values
