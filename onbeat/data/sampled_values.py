"""The arithmetic that generators sample with, for those who compute its very bits again: rows alone, in float64.

    logits ─ bias ─ repetition penalty ─ no early end ─▶ / temperature ─ top_k ─ top_p ─ min_p ─▶ log-probs
             └────────── Contexts.process ──────────┘

A row's numbers are a function of that row, however rows are cut into blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from contracts.sampling import SamplingParams

Ids = NDArray[np.integer]
COLUMNS = 16
"""Attention adds up a row's columns by vectors of so many numbers: a part of a vector would be added up otherwise. So
the columns that a step reads are a multiple of it, and any larger multiple gives the same bits."""
FEWEST_ROWS = 16
"""Products of fewer rows take other kernels, whose last bits depend on how many they are. And a multiple of it leaves
no part of a vector over, which functions like SiLU compute by other instructions."""
BLOCK_ITEMS = 65_536
"""Log-probs that are worked on at a time, half a megabyte: in the core's cache they are several times as fast."""
NEVER = -1e20
"""The logit of a token that may not be drawn yet: its probability is 0, and an entropy, p log p, no NaN."""


@dataclass(frozen=True, kw_only=True)
class Contexts:
    """The tokens before each of N sampled ones, where the sampling's settings make its logits depend on it."""

    sampling: SamplingParams
    end_ids: Ids
    """[E] the tokens that end the model's completions."""
    num_new: Ids
    """[N] tokens of its completion, or of its turn, before each."""
    seen: Callable[[int], Ids]
    """Number of one of them → the ids before it, the prompt's too; with a gradient each id once."""
    first: int = 0
    """The number of the first of the N."""

    def rows(self, rows: slice) -> Contexts:
        """Returns those of some of the tokens, one after another."""
        return replace(self, num_new=self.num_new[rows], first=self.first + rows.start)

    def split(self, size: int) -> list[Contexts]:
        """Cuts after each `size` tokens."""
        return [self.rows(slice(start, start + size)) for start in range(0, len(self.num_new), size)]

    def process(self, logits: Any) -> None:
        """Changes [N, V] logits, an array or a tensor, in their place; a gradient goes through it."""
        sampling = self.sampling
        library = library_of(logits)
        index = partial(library.asarray, device=logits.device)
        if sampling.logit_bias:
            ids = np.array([int(token) for token in sampling.logit_bias])
            logits[:, index(ids)] += index(np.array(list(sampling.logit_bias.values())))
        if sampling.repetition_penalty not in (UNSET, 1.0):
            sets = [self.seen(self.first + number) for number in range(len(self.num_new))]
            rows = np.repeat(np.arange(len(sets)), [len(ids) for ids in sets])
            places = index(rows), index(np.concatenate(sets).astype(np.int64))
            # An id that stands twice in a set is read twice before it is written: it is scaled once.
            seen = logits[places]
            is_up = seen >= 0.0
            seen[is_up] /= sampling.repetition_penalty
            seen[~is_up] *= sampling.repetition_penalty
            logits[places] = seen
        early = np.flatnonzero(self.num_new < (sampling.min_new_tokens or 0))
        if len(early):
            ends = np.union1d(self.end_ids, sampling.stop_token_ids or ()).astype(np.int64)
            logits[index(early)[:, None], index(ends)] = NEVER


def library_of(values: Any) -> Any:
    """torch of tensors, numpy of arrays: what is called here has one name and one meaning in both."""
    return torch if isinstance(values, Tensor) else np


def scaled(logits: Any, temperature: float, contexts: Contexts | None = None) -> Any:
    """Returns [N, V] logits / temperature, less the largest of each row, which is 0 then; temperature 0 stands for 1.

    They are float64, where the logits are. contexts: what changes them before. A row that is not finite stays so.
    """
    library = library_of(logits)
    values = library.asarray(logits, dtype=library.float64, copy=True)
    if contexts is not None:
        contexts.process(values)
    # softmax(x) = softmax(x - max x), whose exponentials lie in [0, 1] and can't overflow.
    values -= library.amax(values, axis=-1, keepdims=True)
    if temperature not in (0.0, 1.0):
        values /= temperature
    return values


def normalised(values: Any) -> Any:
    """Makes log-probs of `scaled` [N, V], in their place: -inf, which was filtered out, stays -inf."""
    # log p = x - log sum exp x, over what is left. The largest is 0: the sum is 1 or more, and its logarithm finite.
    library = library_of(values)
    values -= library.log(library.exp(values).sum(axis=-1, keepdims=True))
    return values
