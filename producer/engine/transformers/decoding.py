"""Decoding of a batch by itself, by transformers' own forward, over key and value tensors that are made once.

    prompts [k, P] ─ prefill ─▶ keys, values [k] ─ repeat G ─▶ room for [k·G, P + T] ─▶ logits [k·G, V] ─▶ token ─┐
                                                                    ▲                                             │
                                                                    └──────────── one column a step ──────────────┘

It decodes what shared steps (shared_decoding.py) can't: models whose layers keep something else of a row than keys and
values by token, as linear attention does (onbeat/base/group_cache.py), and models whose rows depend on the rows next to
them, as a mixture of experts does. Which rows a step holds is a function of the batch alone, so its
numbers are, too (I7).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from contracts.errors import BatchFailed, InvalidInput
from contracts.rollouts import PromptBatch
from onbeat.base.group_cache import group_cache
from onbeat.base.routers import TappedRouters, tap_routers
from producer.engine.growing_rows import GrowingBatch, HeldRows, Places
from producer.engine.sampling import Ends, Logits
from producer.engine.transformers.recorded_routes import prompt_routes, token_routes
from producer.engine.transformers.row_steps import forward, left_padded, prompt_lengths, to_draw_from

FEWEST_ROWS = 8
"""Least number of held rows: products of fewer take other kernels, whose last bits differ, and hardly cost less."""
LEAVE_SHARE = 0.25
"""Rows leave when so large a share of the held ones has ended: moving the others has its price."""


def staying(has_ended: NDArray[np.bool_]) -> Places | None:
    """Chooses the rows that stay in the model.

    Args:
        has_ended: [N] True where a row has ended.

    Returns:
        The places of those that stay, ascending; None if all stay. FEWEST_ROWS stay in any case, ended ones among them.
    """
    num_kept = max(FEWEST_ROWS, len(has_ended) - int(has_ended.sum()))
    if len(has_ended) - num_kept < LEAVE_SHARE * len(has_ended):
        return None
    # False sorts before True: rows that go on come first, then as many ended ones as are needed. Then they are sorted
    # by place again, since an engine moves the rows of its cache forward only.
    return np.sort(np.argsort(has_ended, kind="stable")[:num_kept])


class RoomLayer(DynamicLayer):
    """A layer's keys and values in tensors that have room for every token to come: a step writes one column.

    Axes are [row, head, token, head dimension]. Transformers' own layer concatenates, and so copies all earlier tokens
    at every step.
    """

    def __init__(self, *, num_tokens: int) -> None:
        super().__init__()
        self.keys: Tensor
        self.values: Tensor
        self._num_tokens = num_tokens
        self._used = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes [N, H, S, D] new keys and values; answers views of all so far. The prompts' are held as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states
            self.values = value_states
            self._used = key_states.shape[-2]
            return key_states, value_states
        end = self._used + key_states.shape[-2]
        # [row, head, token, head dimension]: the new tokens' columns.
        self.keys[:, :, self._used : end] = key_states
        self.values[:, :, self._used : end] = value_states
        self._used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._used

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats the prompts' keys and values [k, H, P, D] to [k·repeats, H, P + T, D], of which P columns are used.

        It is called once, after the prompts.
        """
        self.keys, self.values = (self._with_room(half, repeats) for half in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Moves the rows of `indices` (ascending) to the front, and forgets the others."""
        # The right side is a copy, so no row is overwritten before it is read; columns to come hold nothing yet.
        for half in (self.keys, self.values):
            half[: len(indices), :, : self._used] = half[indices, :, : self._used]
        self.keys = self.keys[: len(indices)]
        self.values = self.values[: len(indices)]

    def _with_room(self, half: Tensor, repeats: int) -> Tensor:
        num_prompts, num_heads, used, head_dim = half.shape
        # Row p·G + g is sample g of prompt p: the repeats are an axis of their own behind the prompts, then flattened.
        room = half.new_empty(num_prompts, repeats, num_heads, self._num_tokens, head_dim)
        room[:, :, :, :used] = half[:, None]
        return room.flatten(0, 1)


class Decoding:
    """The rows of one batch in the model. Runs under torch.inference_mode."""

    def __init__(self, model: PreTrainedModel, token_ids: Tensor, mask: Tensor, *, max_new_tokens: int) -> None:
        """Takes the prompts.

        Args:
            model: The model.
            token_ids: [k, P] with the prompts at the right edge.
            mask: [k, P]; 0 left of the prompts.
            max_new_tokens: The most tokens that follow.
        """
        self._model = model
        self._prompt_ids = token_ids
        self._mask = mask
        # Room for the last token too, though it is never an input.
        num_tokens = token_ids.shape[1] + max_new_tokens
        self._cache = group_cache(model.config)
        # Layers of another kind (a sliding window, a state of linear attention) grow by themselves.
        self._cache.layers = [
            RoomLayer(num_tokens=num_tokens) if type(layer) is DynamicLayer else layer for layer in self._cache.layers
        ]

    def prefill(self, group_size: int) -> Logits:
        """Sends each prompt through the model once, and repeats it for its G rows, which follow one another.

        Returns:
            Logits [k·G, V] after the prompts.
        """
        logits = forward(self._model, self._prompt_ids, self._mask, self._cache)
        self._cache.batch_repeat_interleave(group_size)
        self._mask = self._mask.repeat_interleave(group_size, dim=0)
        return to_draw_from(logits.repeat_interleave(group_size, dim=0))

    def step(self, next_tokens: np.ndarray) -> Logits:
        """Sends a token of each row through the model: [N] tokens → [N, V] logits after them."""
        tokens = torch.from_numpy(next_tokens).to(self._mask.device)
        # [N, P + t] → [N, P + t + 1]: the new token is attended to, also in rows that are padded on the left.
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return to_draw_from(forward(self._model, tokens[:, None], self._mask, self._cache))

    def keep(self, rows: np.ndarray) -> None:
        """Lets only these rows (ascending) go on."""
        indices = torch.from_numpy(rows).to(self._mask.device)
        self._cache.batch_select_indices(indices)
        self._mask = self._mask[indices]


class LoneDecoding:
    """A Decoder of one batch at a time. Runs in one thread, under torch.inference_mode."""

    def __init__(self, model: PreTrainedModel, ends: Ends) -> None:
        self._model = model
        self._tapped: TappedRouters | None = None
        """The model's routers, once a batch with routes has come."""
        self._routers: TappedRouters | None = None
        """The same, while such a batch is decoded."""
        self._growing: GrowingBatch | None = None
        self._rows = HeldRows(ends)
        self._decoding: Decoding
        self._tokens: np.ndarray

    def fits(self, batch: PromptBatch) -> bool:
        """Returns False: no batch joins another."""
        return False

    def join(self, growing: GrowingBatch) -> None:
        self.reset()
        batch = growing.batch
        token_ids, mask = left_padded(batch, self._model.device)
        if batch.has_routes:
            self._record_routes()
        self._decoding = Decoding(self._model, token_ids, mask, max_new_tokens=batch.sampling.max_new_tokens)
        self._rows.join(growing)
        self._growing = growing
        logits = self._decoding.prefill(batch.group_size)
        if self._routers is not None:
            growing.prompt_routes = prompt_routes(self._routers, prompt_lengths(batch))
        self._append(growing, logits)

    def advance(self) -> list[GrowingBatch]:
        growing = self._growing
        if growing is None:
            raise AssertionError("there are no rows")
        places = staying(self._rows.has_ended())
        if places is not None:
            self._decoding.keep(places)
            self._rows.keep(places)
            self._tokens = self._tokens[places]
        logits = self._decoding.step(self._tokens)
        if self._routers is not None:
            # Of the tokens that this step fed, before the next ones are drawn: a row that ends with one has its own.
            self._rows.add_routes(token_routes(self._routers))
        try:
            self._append(growing, logits)
        except BatchFailed:
            self.reset()
            return [growing]
        return []

    def drop(self, growing: GrowingBatch) -> None:
        self.reset()

    def reset(self) -> None:
        self._growing = None
        self._rows.keep(np.arange(0))
        self.__dict__.pop("_decoding", None)
        if self._routers is not None:
            self._routers.record(False)
            self._routers = None

    def _record_routes(self) -> None:
        """Has the routers record their choices until the batch has left. Raises BatchFailed for unknown ones."""
        if self._tapped is None:
            try:
                self._tapped = tap_routers(self._model)
            except InvalidInput as error:
                raise BatchFailed(error.problem, cure=f"leave {error.field} out") from error
        self._routers = self._tapped
        self._routers.record(True)

    def _append(self, growing: GrowingBatch, logits: Logits) -> None:
        self._tokens, _ = self._rows.append(logits)
        if growing.finished:
            self.reset()
