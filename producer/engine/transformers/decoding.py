"""One batch's decoding: prompts once, then a token a row, over key and value tensors that are made once.

    prompts [k, P] ─ prefill ─▶ keys, values [k] ─ repeat G ─▶ room for [k·G, P + T] ─▶ logits [k·G, V] ─▶ token ─┐
                                                                    ▲                                             │
                                                                    └──────────── one column a step ──────────────┘

Rows that have ended leave: which rows a step holds is a function of the batch alone, so its numbers are, too (I7).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from producer.engine.transformers.lean_step import LeanStep, lean_step


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
            self.keys, self.values, self._used = key_states, value_states, key_states.shape[-2]
            return key_states, value_states
        end = self._used + key_states.shape[-2]
        self.keys[:, :, self._used : end] = key_states
        self.values[:, :, self._used : end] = value_states
        self._used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._used

    def batch_repeat_interleave(self, repeats: int) -> None:
        """[k, H, P, D] → [k·repeats, H, P + T, D], of which P are used; called once, after the prompts."""
        self.keys, self.values = (self._with_room(held, repeats) for held in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Moves the rows of `indices` (ascending) to the front, and forgets the others."""
        # The right side is a copy, so no row is overwritten before it is read; columns to come hold nothing yet.
        for held in (self.keys, self.values):
            held[: len(indices), :, : self._used] = held[indices, :, : self._used]
        self.keys, self.values = self.keys[: len(indices)], self.values[: len(indices)]

    def _with_room(self, held: Tensor, repeats: int) -> Tensor:
        num_prompts, num_heads, used, head_dim = held.shape
        # Row p·G + g is sample g of prompt p: the repeats are an axis of their own behind the prompts, then flattened.
        room = held.new_empty(num_prompts, repeats, num_heads, self._num_tokens, head_dim)
        room[:, :, :, :used] = held[:, None]
        return room.flatten(0, 1)


class Decoding:
    """The rows of one batch in the model. Runs under torch.inference_mode."""

    def __init__(self, model: PreTrainedModel, token_ids: Tensor, mask: Tensor, *, max_new_tokens: int) -> None:
        """token_ids, mask: [k, P] with the prompts at the right edge; the mask is 0 left of them."""
        self._model = model
        self._prompt_ids = token_ids
        self._mask = mask
        self._num_tokens = token_ids.shape[1] + max_new_tokens
        self._cache = DynamicCache(config=model.config)
        # Layers of another kind (a sliding window, a recurrent state) stay transformers' own.
        self._cache.layers = [
            RoomLayer(num_tokens=self._num_tokens) if type(layer) is DynamicLayer else layer
            for layer in self._cache.layers
        ]
        self._lean: LeanStep | None = None

    def prefill(self, group_size: int) -> np.ndarray:
        """Logits [k·G, V] after the prompts: each goes through the model once, and its G rows follow one another."""
        logits = self._forward(self._prompt_ids)
        self._cache.batch_repeat_interleave(group_size)
        self._mask = self._mask.repeat_interleave(group_size, dim=0)
        self._lean = lean_step(self._model, self._cache, self._mask, num_tokens=self._num_tokens)
        return logits.repeat(group_size, axis=0)

    def step(self, next_tokens: np.ndarray) -> np.ndarray:
        """[N] next tokens → [N, V] logits after them."""
        tokens = torch.from_numpy(next_tokens).to(self._mask.device)
        if self._lean is not None:
            return _on_host(self._lean(tokens))
        # [N, P + t] → [N, P + t + 1]: the new token is attended to, also in rows that are padded on the left.
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        return self._forward(tokens[:, None])

    def keep(self, rows: np.ndarray) -> None:
        """Lets only these rows (ascending) go on."""
        indices = torch.from_numpy(rows).to(self._mask.device)
        self._cache.batch_select_indices(indices)
        self._mask = self._mask[indices]
        if self._lean is not None:
            self._lean.keep(indices)

    def _forward(self, token_ids: Tensor) -> np.ndarray:
        """[N, S] new tokens → [N, V] logits after the last one, by transformers' own forward."""
        # A token's position is the number of real tokens before it. Padding, which the mask hides, gets 0, not -1.
        # Only the S columns of the new tokens are needed.
        positions = (self._mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -token_ids.shape[1] :]
        output = self._model(
            input_ids=token_ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return _on_host(output.logits[:, -1])


def _on_host(logits: Tensor) -> np.ndarray:
    return logits.float().cpu().numpy()
