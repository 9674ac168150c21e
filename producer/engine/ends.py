"""Where a completion ends before its longest: at a token of the model's or the job's, or at a text of the job's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from contracts.sampling import SamplingParams

MARGIN_TOKENS = 8
"""Tokens that are read beside as many as a text has bytes: some tokens have no text of their own."""
Decode = Callable[[list[int]], str]
Tail = Callable[[int, int], NDArray[np.integer]]
"""(row of N, how many) → its last tokens, the new one among them."""


class Ends:
    """The ends of one model's completions; whether a row ends is a function of its tokens alone (I7)."""

    def __init__(self, eos_ids: frozenset[int], decode: Decode | None = None) -> None:
        """decode: tokens → their text without special tokens, as rewards see it; None where no job has stop texts."""
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self._decode = decode

    def reached(self, tokens: NDArray[np.int64], sampling: SamplingParams, tail: Tail) -> NDArray[np.bool_]:
        """[N] the token that each row has got → [N] whether it ends the row."""
        ended = (tokens[:, None] == self._eos_ids).any(axis=1)
        if sampling.stop_token_ids:
            ended |= np.isin(tokens, sampling.stop_token_ids)
        if sampling.stop:
            window = MARGIN_TOKENS + max(len(text.encode()) for text in sampling.stop)
            for row in np.flatnonzero(~ended).tolist():
                ended[row] = self._has_stop(tail(row, window).tolist(), sampling.stop)
        return ended

    def _has_stop(self, tokens: list[int], stop: Sequence[str]) -> bool:
        assert self._decode is not None, "an engine that reads no text was given a job with stop texts"
        text = self._decode(tokens)
        return any(one in text for one in stop)
