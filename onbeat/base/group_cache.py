"""Transformers' cache in layers that a group can share: prompts go through once, and each of their rows goes on.

    prompts [k] ─ forward ─▶ cache of k rows ─ batch_repeat_interleave(G) ─▶ cache of k·G rows ─ forward ─▶ responses
                                                reorder_cache(prompt of each row)

Transformers' layers of linear attention write a new state over the old one, into memory that stays where it is. The
backward pass of a prompt needs the old one, and such a layer has no method that repeats or picks its rows. Here a new
state takes the place of the old one, as keys and values do, and the layers have those methods. The numbers are those of
transformers' layers, bit for bit (tests/contract/test_group_cache.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

PAST = "past_key_values"
"""The argument of a forward that takes the cache of a model with attention."""


class StateLayer(LinearAttentionLayer):
    """A layer's states of linear attention: the last inputs of its convolution, and what it remembers of all tokens.

    Each is a tensor whose first axis is the row. A layer without any of them, such as a mixture of experts, stays
    empty.
    """

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Takes [N, channel, S] new inputs of the convolution.

        Args:
            conv_states: The new inputs.
            state_idx: The number of the convolution in its layer.
            conv_kernel_size: The inputs that the convolution needs; left out: S, as in transformers.
            kwargs: Left to architectures of their own.

        Returns:
            The inputs before them and the new ones, at least as many as the convolution needs.
        """
        before = self.conv_states[state_idx]
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            self.conv_kernel_size[state_idx] = width
            self._note(conv_states)
            # Zeros on the left stand for the inputs before the first token.
            inputs = functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = before.shape[-1]
            inputs = torch.cat((before, conv_states), dim=-1)
        self.conv_states[state_idx] = inputs[..., -width:]
        self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Takes the state [N, …] after the newest token, and returns it."""
        self._note(recurrent_states)
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row `repeats` times: the rows of a prompt follow one another."""
        self._change_states(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows of `indices`, in that order."""
        self._change_states(lambda state: state[indices])

    def _note(self, state: Tensor) -> None:
        """Notes where the states are, for transformers' methods."""
        self.device = state.device
        self.dtype = state.dtype

    def _change_states(self, change: Callable[[Tensor], Tensor]) -> None:
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    states[number] = change(state)


class StateAndKeysLayer(StateLayer, LinearAttentionAndFullAttentionLayer):
    """A layer with states of linear attention and with keys and values, as Falcon-H1 has them side by side."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        StateLayer.batch_repeat_interleave(self, repeats)
        DynamicLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        StateLayer.batch_select_indices(self, indices)
        DynamicLayer.batch_select_indices(self, indices)


class StateAndWindowLayer(StateLayer, LinearAttentionAndSlidingWindowAttentionLayer):
    """Likewise, with the keys and values of a sliding window."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        StateLayer.batch_repeat_interleave(self, repeats)
        DynamicSlidingWindowLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        StateLayer.batch_select_indices(self, indices)
        DynamicSlidingWindowLayer.batch_select_indices(self, indices)


KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    StateLayer,
    StateAndKeysLayer,
    StateAndWindowLayer,
)
"""Exact classes, all of whose memory of a row is repeated with it: one that derives from them may remember more."""


def group_cache(config: Any) -> DynamicCache:
    """Returns an empty cache for a model of this config, whose rows can be repeated and picked."""
    cache = DynamicCache(config=config)
    cache.layers = [_of_group(layer) for layer in cache.layers]
    return cache


@functools.cache
def cache_argument(architecture: type[Any]) -> str:
    """Returns the name by which an architecture's forward takes its cache; it would ignore another name."""
    if PAST in inspect.signature(architecture.forward).parameters:
        return PAST
    # Mamba and its like, which have no attention.
    return "cache_params"


def unknown_layers(cache: DynamicCache) -> list[str]:
    """Returns the kinds of a cache's layers that may remember something of a row that isn't repeated, by name."""
    unknown: set[str] = set()
    for layer in cache.layers:
        kind = type(layer)
        # A kind of an architecture's own is known where it repeats what it remembers by a method of its own.
        if kind not in KNOWN_LAYERS and "batch_repeat_interleave" not in vars(kind):
            unknown.add(kind.__name__)
    return sorted(unknown)


def _of_group(layer: Any) -> Any:
    if type(layer) is LinearAttentionLayer:
        return StateLayer(number_of_states=layer.number_of_states)
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return StateAndKeysLayer(number_of_states=layer.number_of_states)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return StateAndWindowLayer(layer.sliding_window, number_of_states=layer.number_of_states)
    return layer
