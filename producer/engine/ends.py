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
        self.eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self._decode = decode

    def reached(self, tokens: NDArray[np.int64], sampling: SamplingParams, tail: Tail) -> NDArray[np.bool_]:
        """[N] the token that each row has got → [N] whether it ends the row."""
        ended = (tokens[:, None] == self.eos_ids).any(axis=1)
        if sampling.stop_token_ids:
            ended |= np.isin(tokens, sampling.stop_token_ids)
        least = sampling.min_new_tokens or 0
        if sampling.stop:
            window = MARGIN_TOKENS + max(len(text.encode()) for text in sampling.stop)
            for row in np.flatnonzero(~ended).tolist():
                last = tail(row, max(window, least + 1)).tolist()
                ended[row] = len(last) > least and self._completes(last[-window:], sampling.stop, is_first=not least)
        return ended

    def _completes(self, tokens: list[int], stop: Sequence[str], *, is_first: bool) -> bool:
        """Whether the last token completes a text. is_first: whether none can stand before it."""
        assert self._decode is not None, "an engine that reads no text was given a job with stop texts"
        text, before = self._decode(tokens), "" if is_first else self._decode(tokens[:-1])
        return any(text.count(one) > before.count(one) for one in stop)
