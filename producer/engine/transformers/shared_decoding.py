"""Rows of one batch or of several in the model: they join with their prompts' keys and values, and share each step.

    join ─ prompts, alone ─▶ first tokens ─┐
                                           ├─▶ step ─▶ tokens ─┬─▶ step ─▶ …
    rows that are held ────────────────────┘                   └─▶ rows that have ended leave

A batch's completions are a function of the batch (I7): its prompts go through the model by themselves, and a step gives
a row the same bits in any company. For that a step never has fewer than FEWEST_ROWS rows, and their number is a
multiple of ROWS: free places fill it up. row_independence.py compares each number of rows that batches may share.

A later turn joins with keys and values of all tokens before it. Those of the prompt batch are the first turn's,
all others a step's: the same bits whether they were kept (trajectory_caches.py) or are fed again, to any rows at once.
Only where a row's bits depend on its company a turn is a batch as any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from contracts.errors import BatchFailed
from contracts.rollouts import PromptBatch
from producer.engine.base import Turn
from producer.engine.growing_rows import GrowingBatch, HeldRows, Moves, Places, without_a_finite_maximum
from producer.engine.sampling import Ends, Logits
from producer.engine.transformers import row_steps
from producer.engine.transformers.cuda_graphs import run_of
from producer.engine.transformers.packed_products import FEWEST_ROWS, MOST_ROWS, ROWS
from producer.engine.transformers.row_cache import CacheShape, RowCache, full_cache, rounded_up
from producer.engine.transformers.row_independence import Alike
from producer.engine.transformers.trajectory_caches import KeptRows, Past, Tokens, num_common


class SharedDecoding:
    """A Decoder of several batches. Runs in one thread, under torch.inference_mode."""

    def __init__(
        self,
        model: PreTrainedModel,
        step: row_steps.RowStep,
        ends: Ends,
        *,
        most_rows: int,
        most_bytes: int,
        alike: Alike | None = None,
        kept_rows: KeptRows | None = None,
    ) -> None:
        """Begins without rows.

        Args:
            model: The model.
            step: The model's step.
            ends: The ends of completions.
            most_rows: The most rows that several batches have together; 0 stands for one batch at a time. A batch that
                is larger by itself is decoded without company.
            most_bytes: The most memory that they have together.
            alike: Compares a row's bits among so many rows with those alone, "" for the same; None where they differ.
            kept_rows: The pasts that trajectories keep between their turns.
        """
        self._model = model
        self._step = step
        self._run = run_of(step)
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._alike = alike
        self._kept_rows = kept_rows or KeptRows(0)
        self._rows = HeldRows(ends)
        self._cache: RowCache | None = None
        self._tokens = np.zeros(FEWEST_ROWS, dtype=np.int64)
        """[R] the next input token of each place."""
        self._positions = np.zeros(FEWEST_ROWS, dtype=np.int64)
        """[R] its position."""

    def fits(self, batch: PromptBatch) -> bool:
        if len(self._rows) + batch.num_completions > self._most_rows or self._cache is None:
            return False
        num_columns = max(self._cache.num_columns, longest_row(batch))
        return self._cache.bytes_of(self._num_places_with(batch), num_columns) <= self._most_bytes

    def join(self, growing: GrowingBatch) -> None:
        if growing.batch.has_routes:
            # Rows share steps where a model has no experts (row_independence.py).
            raise BatchFailed(
                f"batch {growing.batch.batch_id} asks for the experts of its tokens, and the model has none",
                cure="leave algorithm.routing_replay out",
            )
        turn = growing.turn
        # Asked at the first turn, too: whether its rows are kept.
        if turn is not None and self._may_go_on(turn) and turn.rows is not None:
            self._go_on(growing, turn, turn.rows)
        else:
            self._join_prompts(growing)

    def _join_prompts(self, growing: GrowingBatch) -> None:
        batch = growing.batch
        lengths = row_steps.prompt_lengths(growing.batch)
        prompts, logits = self._prefilled(batch)
        logits = logits.repeat_interleave(batch.group_size, dim=0)
        cache = self._with_room(row_steps.cache_shape(prompts, self._step.windows), batch)
        places = self._rows.join(growing)
        try:
            cache.put(int(places[0]), prompts, lengths, group_size=batch.group_size)
            self._positions[places] = np.repeat(lengths, batch.group_size)
            tokens, ended = self._rows.append(row_steps.to_draw_from(logits), places)
        except BaseException:
            self._rows.leave(places)
            raise
        self._tokens[places] = tokens
        self._leave(ended)

    def _prefilled(self, batch: PromptBatch) -> tuple[Tensor, Tensor]:
        """Keys and values of a batch's prompts (held_prompts), and the logits [k, V] after them."""
        token_ids, mask = row_steps.left_padded(batch, self._model.device)
        prompts = full_cache(self._model.config)
        logits = row_steps.forward(self._model, token_ids, mask, prompts)
        return row_steps.held_prompts(prompts), logits

    def _go_on(self, growing: GrowingBatch, turn: Turn, rows: Sequence[int]) -> None:
        """Takes in a later turn. The next step feeds the last token of each context, and samples the turn's first."""
        contexts = [np.frombuffer(prompt.token_ids, dtype="<i4") for prompt in growing.batch.prompts]
        pasts = self._pasts(turn, rows, contexts)
        # [None]: a cache is laid out by [row, layer, …], and the past of one row has no axis of rows.
        shape = row_steps.cache_shape(pasts[0].keys_and_values[None], self._step.windows)
        cache = self._with_room(shape, growing.batch)
        first = len(self._rows)
        for place, past in enumerate(pasts, start=first):
            cache.put(place, past.keys_and_values[None], [len(past.tokens)], group_size=1)
        for start in range(0, len(rows), MOST_ROWS):
            part = slice(start, start + MOST_ROWS)
            self._feed(cache, first + start, contexts[part], [len(past.tokens) for past in pasts[part]])
        places = self._rows.join(growing)
        # The last token of a context was never an input: the next step feeds it.
        self._tokens[places] = [context[-1] for context in contexts]
        self._positions[places] = [len(context) - 1 for context in contexts]

    def _may_go_on(self, turn: Turn) -> bool:
        """Returns True where the rows of these trajectories have the same bits in any company that they may be in."""
        num_rows = rounded_up(max(MOST_ROWS, turn.trajectories.prompt_batch.num_completions), ROWS)
        return self._alike is not None and not self._alike(num_rows)

    def _pasts(self, turn: Turn, rows: Sequence[int], contexts: Sequence[Tokens]) -> list[Past]:
        """Returns the past of each row: at least its prompt, which goes through the model again if need be.

        A row that begins anew may have more of its prompt than the kept past has: the prompt's bits come
        first.
        """
        trajectories = turn.trajectories
        prompt_batch = trajectories.prompt_batch
        earlier = [trajectories.pasts.pop(row, None) for row in rows]
        # Row p·G + g is sample g of prompt p.
        prompts = [
            np.frombuffer(prompt_batch.prompts[row // prompt_batch.group_size].token_ids, dtype="<i4") for row in rows
        ]
        pasts: list[Past | None] = []
        for past, prompt, context in zip(earlier, prompts, contexts, strict=True):
            serves = past is not None and num_common(past.tokens, context) >= num_common(prompt, context)
            pasts.append(past if serves else None)
        prompt_pasts = self._prompt_pasts(prompt_batch) if None in pasts else []
        common = [
            (past or prompt_pasts[row // prompt_batch.group_size]).common_with(context)
            for past, row, context in zip(pasts, rows, contexts, strict=True)
        ]
        turn.num_kept_tokens = sum(len(of.tokens) for of, past in zip(common, pasts, strict=True) if past is not None)
        return common

    def _prompt_pasts(self, prompt_batch: PromptBatch) -> list[Past]:
        """Computes the pasts of the first turn's prompts anew."""
        # Together, as at the first turn: the width of the padding is part of a prompt's bits.
        past, _ = self._prefilled(prompt_batch)
        return [
            Past(tokens=np.frombuffer(prompt.token_ids, dtype="<i4"), keys_and_values=of_prompt[:, :, -length:])
            for prompt, of_prompt, length in zip(
                prompt_batch.prompts, past, row_steps.prompt_lengths(prompt_batch), strict=True
            )
        ]

    def _feed(self, cache: RowCache, first: int, contexts: Sequence[Tokens], starts: Sequence[int]) -> None:
        """Feeds the tokens of contexts, each from its start to before its last, to the rows at places from `first` on.

        A row with fewer of them than others is fed its last one meanwhile, as the next step does: the same bits.
        """
        lasts = [len(context) - 1 for context in contexts]
        most = max(last - start for start, last in zip(starts, lasts, strict=True))
        width = rounded_up(len(contexts), ROWS)
        at_once = max(1, self._step.most_fed // width)
        shape = (rounded_up(most, at_once), width)
        tokens = np.zeros(shape, dtype=np.int64)
        positions = np.zeros(shape, dtype=np.int64)
        for row, (context, start, last) in enumerate(zip(contexts, starts, lasts, strict=True)):
            # [step, row]: a row that is done with its tokens is fed its last one again.
            positions[:, row] = np.minimum(np.arange(start, start + shape[0]), last)
            tokens[:, row] = context[positions[:, row]]
        device = cache.shape.device
        for begin in range(0, shape[0], at_once):
            part = slice(begin, begin + at_once)
            at = torch.from_numpy(positions[part]).to(device)
            cache.begin_step(at, rounded_up(int(positions[part].max()) + 1), first=first)
            self._step.feed(torch.from_numpy(tokens[part]).to(device), at, cache)

    def advance(self) -> list[GrowingBatch]:
        num_rows = len(self._rows)
        cache = self._cache
        if cache is None:
            raise AssertionError("there are no rows")
        num_columns = int(self._positions[:num_rows].max()) + 1
        width, num_columns = self._run.size(_num_places(num_rows), rounded_up(num_columns), cache)
        # What fills the step up attends to a first column: a row that attends to none is NaN.
        self._tokens[num_rows:width] = self._positions[num_rows:width] = 0
        tokens, positions = (torch.from_numpy(of[:width]) for of in (self._tokens, self._positions))
        logits = row_steps.to_draw_from(self._run(tokens, positions, cache, num_columns=num_columns)[:num_rows])
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
        # The token that was drawn stands one position behind the last input.
        self._positions[:num_rows] += 1
        self._leave(ended)
        return diverged

    def drop(self, growing: GrowingBatch) -> None:
        self._follow(self._rows.leave(self._rows.places_of(growing)))

    def reset(self) -> None:
        self._rows.leave(np.arange(len(self._rows)))
        self._cache = None
        self._run.reset()

    def _leave(self, ended: Places) -> None:
        """Lets rows that have ended go, and keeps what the next turn of theirs may need."""
        if not len(ended):
            return
        free_bytes = self._kept_rows.free_bytes
        for place in ended.tolist():
            growing, row = self._rows.owner_of(place)
            turn = growing.turn
            if turn is None or self._cache is None or not self._may_go_on(turn):
                continue
            # The last token was sampled, and never was a step's input.
            num_tokens = int(self._positions[place])
            free_bytes -= self._cache.bytes_of(1, num_tokens)
            if free_bytes >= 0:
                prompt = growing.batch.prompts[row // growing.batch.group_size]
                tokens = np.frombuffer(prompt.token_ids + growing.ended[row].token_ids, dtype="<i4")
                past = Past(tokens=tokens[:num_tokens], keys_and_values=self._cache.first_tokens(place, num_tokens))
                self._kept_rows.keep(turn.trajectories, row if turn.rows is None else turn.rows[row], past)
        self._follow(self._rows.leave(ended))

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
        source = moves.source
        target = moves.target
        self._tokens[target] = self._tokens[source]
        self._positions[target] = self._positions[source]
        if self._cache is not None:
            in_use = rounded_up(int(self._positions[target].max()))
            self._cache.move(source.tolist(), target.tolist(), in_use)

    def _with_room(self, shape: CacheShape, batch: PromptBatch) -> RowCache:
        """Answers the cache, with room for a batch that joins."""
        num_places = self._num_places_with(batch)
        num_columns = longest_row(batch)
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

    def _num_places_with(self, batch: PromptBatch) -> int:
        """Places of the step, and of what is fed, once a batch has joined."""
        num_rows = len(self._rows)
        num_more = batch.num_completions
        return max(_num_places(num_rows + num_more), num_rows + rounded_up(num_more, ROWS))


def longest_row(batch: PromptBatch) -> int:
    """Returns the tokens of the longest prompt with its completion."""
    return max(row_steps.prompt_lengths(batch)) + batch.sampling.max_new_tokens


def _num_places(num_rows: int) -> int:
    """Returns the rows of the step that decodes so many."""
    return max(FEWEST_ROWS, rounded_up(num_rows, ROWS))
