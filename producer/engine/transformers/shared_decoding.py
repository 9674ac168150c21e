"""Rows of one batch or of several in the model: they join with their prompts' keys and values, and share each step.

    join ─ prompts, alone ─▶ first tokens ─┐
                                           ├─▶ step ─▶ tokens ─┬─▶ step ─▶ …
    rows that are held ────────────────────┘                   └─▶ rows that have ended leave

A batch's completions are a function of the batch (I7): its prompts go through the model by themselves, and a step gives
a row the same bits in any company. For that a step never has fewer than FEWEST_ROWS rows, and their number is a
multiple of ROWS: free places fill it up. canary.py compares each number of rows that batches may share.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from contracts.errors import BatchFailed
from contracts.rollouts import PromptBatch
from producer.engine.held_rows import GrowingBatch, HeldRows, Moves, without_a_finite_maximum
from producer.engine.sampling import Logits
from producer.engine.transformers.packed_products import FEWEST_ROWS, ROWS
from producer.engine.transformers.row_cache import CacheShape, RowCache, rounded_up
from producer.engine.transformers.row_steps import (
    RowStep,
    cache_shape,
    forward,
    held_prompts,
    left_padded,
    prompt_lengths,
    to_draw_from,
)
from producer.engine.transformers.step_runs import run_of


class SharedDecoding:
    """A Decoder of several batches. Runs in one thread, under torch.inference_mode."""

    def __init__(
        self, model: PreTrainedModel, step: RowStep, eos_ids: frozenset[int], *, most_rows: int, most_bytes: int
    ) -> None:
        """most_rows, most_bytes: bounds of what several batches have together; 0 rows stand for one batch at a time.

        A batch that is larger by itself is decoded without company.
        """
        self._model = model
        self._run = run_of(step)
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._rows = HeldRows(eos_ids)
        self._cache: RowCache | None = None
        self._tokens = np.zeros(FEWEST_ROWS, dtype=np.int64)
        """[R] the next input token of each place."""
        self._positions = np.zeros(FEWEST_ROWS, dtype=np.int64)
        """[R] its position."""

    def fits(self, batch: PromptBatch) -> bool:
        num_rows = len(self._rows) + batch.num_completions
        if num_rows > self._most_rows or self._cache is None:
            return False
        num_columns = max(self._cache.num_columns, longest_row(batch))
        return self._cache.bytes_of(_num_places(num_rows), num_columns) <= self._most_bytes

    def join(self, growing: GrowingBatch) -> None:
        batch, lengths = growing.batch, prompt_lengths(growing.batch)
        token_ids, mask = left_padded(batch, self._model.device)
        prompts = DynamicCache(config=self._model.config)
        logits = forward(self._model, token_ids, mask, prompts).repeat_interleave(batch.group_size, dim=0)
        held = held_prompts(prompts)
        cache = self._with_room(cache_shape(held), batch)
        places = self._rows.join(growing)
        try:
            cache.put(int(places[0]), held, lengths, group_size=batch.group_size)
            self._positions[places] = np.repeat(lengths, batch.group_size)
            tokens, ended = self._rows.append(to_draw_from(logits), places)
        except BaseException:
            self._rows.leave(places)
            raise
        self._tokens[places] = tokens
        self._follow(self._rows.leave(ended))

    def advance(self) -> list[GrowingBatch]:
        num_rows, cache = len(self._rows), self._cache
        if cache is None:
            raise AssertionError("there are no rows")
        num_columns = int(self._positions[:num_rows].max()) + 1
        width, num_columns = self._run.size(_num_places(num_rows), rounded_up(num_columns), cache)
        # What fills the step up attends to a first column: a row that attends to none is NaN.
        self._tokens[num_rows:width] = self._positions[num_rows:width] = 0
        tokens, positions = (torch.from_numpy(of[:width]) for of in (self._tokens, self._positions))
        logits = to_draw_from(self._run(tokens, positions, cache, num_columns=num_columns)[:num_rows])
        diverged: list[GrowingBatch] = []
        try:
            next_tokens, ended = self._rows.append(logits)
        except BatchFailed:
            diverged, logits = self._without_diverged(logits)
            if not len(self._rows):
                return diverged
            next_tokens, ended = self._rows.append(logits)
        num_rows = len(self._rows)
        self._tokens[:num_rows] = next_tokens
        self._positions[:num_rows] += 1
        if len(ended):
            self._follow(self._rows.leave(ended))
        return diverged

    def drop(self, growing: GrowingBatch) -> None:
        self._follow(self._rows.leave(self._rows.places_of(growing)))

    def reset(self) -> None:
        self._rows.leave(np.arange(len(self._rows)))
        self._cache = None
        self._run.reset()

    def _without_diverged(self, logits: Logits) -> tuple[list[GrowingBatch], Logits]:
        """Drops each batch with a row from which nothing can be sampled; answers them, and the others' logits."""
        places = without_a_finite_maximum(logits)
        diverged = [growing for growing in self._rows.batches if np.isin(places, self._rows.places_of(growing)).any()]
        for growing in diverged:
            gone = self._rows.places_of(growing)
            if self._cache is not None:
                self._cache.clear(gone.tolist())
            moves = self._rows.leave(gone)
            left = np.arange(len(logits))
            left[moves.target] = moves.source
            logits = logits[left[: moves.num_rows]]
            self._follow(moves)
        return diverged, logits

    def _follow(self, moves: Moves) -> None:
        """Moves what is kept of the rows that took others' places."""
        if not len(moves.target):
            return
        source, target = moves.source, moves.target
        self._tokens[target], self._positions[target] = self._tokens[source], self._positions[source]
        if self._cache is not None:
            in_use = rounded_up(int(self._positions[target].max()))
            self._cache.move(source.tolist(), target.tolist(), in_use)

    def _with_room(self, shape: CacheShape, batch: PromptBatch) -> RowCache:
        """Answers the cache, with room for a batch that joins."""
        num_places, num_columns = _num_places(len(self._rows) + batch.num_completions), longest_row(batch)
        cache = self._cache
        # Without company, what was decoded before leaves no trace: not even in the distances between rows.
        is_kept = len(self._rows) or (cache and cache.suits(num_places, num_columns, exactly=not self._most_rows))
        if cache is None or not is_kept:
            self._cache = None
            cache = RowCache(shape, num_places=num_places, num_columns=num_columns)
        elif num_places > cache.num_places or num_columns > cache.num_columns:
            cache = cache.grown(
                num_places=max(num_places, cache.num_places), num_columns=max(num_columns, cache.num_columns)
            )
        self._cache = cache
        more = max(0, num_places - len(self._tokens))
        self._tokens, self._positions = (np.pad(of, (0, more)) for of in (self._tokens, self._positions))
        return cache


def longest_row(batch: PromptBatch) -> int:
    """Tokens of the longest prompt with its completion."""
    return max(prompt_lengths(batch)) + batch.sampling.max_new_tokens


def _num_places(num_rows: int) -> int:
    """Rows of the step that decodes so many."""
    return max(FEWEST_ROWS, rounded_up(num_rows, ROWS))
