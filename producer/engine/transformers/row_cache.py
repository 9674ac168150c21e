"""Keys and values of the rows of many batches, each row at a place of its own and with columns of its own.

    store [place, layer, 2, column, head, head dimension]      column c of a row is its token c
    mask  [place, column]                                      0 where the row has a token, -inf where it has none yet

A layer with a sliding window has columns for all tokens of a row, too. Its steps hide those behind the window by their
mask, so such a layer takes as much memory as any other.

A row's bits must depend neither on its place, nor on the rows beside it, nor on how many columns are read (I7). So rows
begin at column 0, whatever they are padded to elsewhere; the columns that are read are a multiple of COLUMNS; and what
no row has written is finite, since a mask hides numbers and not NaN. The self-test (row_independence.py) holds the
arithmetic to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from onbeat.data.sampled_values import COLUMNS

MOST_IDLE = 4
"""A cache that is so many times as large as needed is made anew."""


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The shape of a token's keys and values in a model."""

    num_layers: int
    num_heads: int
    """Heads of keys and of values."""
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    windows: tuple[int | None, ...]
    """[layer] the tokens that a layer's attention looks back, the token itself included; None for all."""


class RowCache:
    """Keys and values with room for `num_places` rows of `num_columns` tokens. Runs under torch.inference_mode.

    A decoder creates it, and replaces it by a larger or smaller one; layers write and read it at each step.
    """

    def __init__(self, shape: CacheShape, *, num_places: int, num_columns: int) -> None:
        self.shape = shape
        self.num_places = num_places
        self.num_columns = rounded_up(num_columns)
        # Axes: [row, layer, keys or values, column, head, head dimension].
        self._store = torch.zeros(
            (num_places, shape.num_layers, 2, self.num_columns, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )
        # Added to attention's scores: 0.0 at a row's tokens, -inf at columns that hold none.
        self._mask = torch.full((num_places, self.num_columns), float("-inf"), dtype=shape.dtype, device=shape.device)
        self._all_columns = self._store.flatten(0, 3)
        """[place · layer · 2 · column, head, head dimension]"""
        of_place = 2 * shape.num_layers * self.num_columns
        self._first_columns = torch.arange(num_places, device=shape.device) * self.num_columns
        self._first_of_place = torch.arange(num_places, device=shape.device) * of_place
        self._first_of_layer = torch.arange(0, of_place, self.num_columns, device=shape.device)[:, None]
        """[layer · 2, 1] the first column, inside its place, of each layer's keys and of its values."""
        self._columns = torch.arange(self.num_columns, device=shape.device)
        self._written: Sequence[Tensor] = ()
        """[N] for each layer's keys and values: where the step writes, among all columns."""
        self._read = (0, 0, 0)
        self._views: list[tuple[Tensor, Tensor]] = []
        """The keys and values [row, head, column, head dimension] of each layer that a step reads."""
        self.step_masks: dict[int | None, Sequence[Tensor]] = {}
        """By window: [row, 1, 1, column] of each token that the step has of a row; None stands for no window."""

    def bytes_of(self, num_places: int, num_columns: int) -> int:
        """Returns the memory of a cache of another size."""
        return self._store[0, :, :, 0].nbytes * num_places * rounded_up(num_columns)

    def suits(self, num_places: int, num_columns: int, *, exactly: bool) -> bool:
        """Returns True where so many rows fit and don't leave most of the cache idle.

        Args:
            num_places: Rows.
            num_columns: Tokens of the longest row.
            exactly: True accepts only a cache of just this size.
        """
        if exactly:
            return (num_places, rounded_up(num_columns)) == (self.num_places, self.num_columns)
        fits = num_places <= self.num_places and num_columns <= self.num_columns
        return fits and self.num_places * self.num_columns <= MOST_IDLE * num_places * num_columns

    def put(self, first: int, prompts: Tensor, lengths: Sequence[int], *, group_size: int) -> None:
        """Writes prompts at the places from `first` on: the rows of a prompt follow one another. They attend to no
        other column.

        Args:
            first: The first place.
            prompts: [k, layer, 2, column, head, head dimension]; a prompt's tokens are its last columns.
            lengths: [k] the prompts' tokens.
            group_size: The rows of each prompt.
        """
        rows = self._store[first : first + len(lengths) * group_size].unflatten(0, (-1, group_size))
        mask = self._mask[first : first + len(lengths) * group_size].unflatten(0, (-1, group_size))
        mask.fill_(float("-inf"))
        width = prompts.shape[3]
        if min(lengths) == width:
            rows[:, :, :, :, :width] = prompts[:, None]
            mask[:, :, :width] = 0.0
            return
        for index, length in enumerate(lengths):
            # From the right edge, where prompts are padded on the left, to the columns 0 … length - 1.
            rows[index, :, :, :, :length] = prompts[index, None, :, :, width - length :]
            mask[index, :, :length] = 0.0

    def first_tokens(self, place: int, num_tokens: int) -> Tensor:
        """Copies a row's first tokens: [layer, 2, column, head, head dimension]; of the second axis 0 is keys and 1
        values.
        """
        return self._store[place, :, :, :num_tokens].clone()

    def begin_step(self, positions: Tensor, num_columns: int, *, first: int = 0) -> None:
        """Begins a step of N places from `first` on.

        Args:
            positions: [N] the column that each row's token goes to; [T, N] for T tokens a row, which the step takes as
                T·N tokens in that order.
            num_columns: The number of columns that are read.
            first: The first place.
        """
        num_rows = positions.shape[-1]
        places = slice(first, first + num_rows)
        self._mask.view(-1).index_fill_(0, (self._first_columns[places] + positions).flatten(), 0.0)
        # [layer · 2, T·N]: a first column of each layer's keys (even rows) and values (odd rows), plus the place in it.
        self._written = (self._first_of_layer + (self._first_of_place[places] + positions).flatten()).unbind()
        if self._read != (first, num_rows, num_columns):
            self._read = (first, num_rows, num_columns)
            # [row, head, column, head dimension] of each layer's keys and values.
            halves = self._store[places, :, :, :num_columns].transpose(3, 4).flatten(1, 2).unbind(1)
            # Layer and half are one axis now: the even ones are keys, the odd ones values.
            self._views = list(zip(halves[::2], halves[1::2], strict=True))
        if positions.dim() == 1:
            seen: Sequence[Tensor] = (self._mask[places, None, None, :num_columns],)
        else:
            # All T tokens are written before any of them attends, so what comes after a token is hidden from it.
            hidden = (self._columns[:num_columns] > positions[:, :, None]).to(self.shape.dtype)
            seen = hidden.masked_fill_(hidden > 0.0, float("-inf"))[:, :, None, None].unbind()
        # [N] for each of the T tokens.
        of_tokens = positions.view(-1, num_rows).unbind()
        self.step_masks = {window: self._within(window, seen, of_tokens) for window in set(self.shape.windows)}

    def _within(self, window: int | None, seen: Sequence[Tensor], positions: Sequence[Tensor]) -> Sequence[Tensor]:
        """Hides the columns behind a window.

        Args:
            window: The tokens that are seen, the step's own included; None for all.
            seen: T masks [N, 1, 1, column], 0.0 at each row's tokens and -inf elsewhere.
            positions: T times [N], the column of a row's own token.

        Returns:
            T masks of the same shape.
        """
        if window is None:
            return seen
        columns = self._columns[: seen[0].shape[-1]]
        # A window of W at position p begins at column p - W + 1.
        return [
            mask.masked_fill(columns <= own[:, None, None, None] - window, float("-inf"))
            for mask, own in zip(seen, positions, strict=True)
        ]

    def masks_of(self, layer: int) -> Sequence[Tensor]:
        """Returns a layer's masks in this step, as `step_masks` has them."""
        return self.step_masks[self.shape.windows[layer]]

    @property
    def num_read_columns(self) -> int:
        """The columns that the step reads."""
        return self._read[-1]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the step's keys and values [N, head, head dimension] of a layer; returns all that its rows have."""
        self._all_columns.index_copy_(0, self._written[2 * layer], keys)
        self._all_columns.index_copy_(0, self._written[2 * layer + 1], values)
        return self._views[layer]

    def move(self, source: Sequence[int], target: Sequence[int], num_columns: int) -> None:
        """Copies the rows at places `source` to places `target`, which are others; num_columns are in use."""
        # One by one: an operation on rows by their indices takes several times as long.
        rows = self._store[:, :, :, :num_columns].unbind()
        mask = self._mask.unbind()
        for here, there in zip(source, target, strict=True):
            rows[there].copy_(rows[here])
            mask[there].copy_(mask[here])

    def clear(self, places: Sequence[int]) -> None:
        """Wipes what may not be finite: another row will be here, and read what it has not written."""
        for place in places:
            self._store[place].zero_()

    def picked(self, places: Sequence[int], *, num_columns: int) -> RowCache:
        """Makes another cache, with the rows at these places in this order."""
        cache = RowCache(self.shape, num_places=len(places), num_columns=num_columns)
        for target, source in enumerate(places):
            cache._store[target, :, :, : self.num_columns] = self._store[source]
            cache._mask[target, : self.num_columns] = self._mask[source]
        return cache

    def grown(self, *, num_places: int, num_columns: int) -> RowCache:
        """Makes a larger cache with the same rows."""
        larger = RowCache(self.shape, num_places=num_places, num_columns=num_columns)
        larger._store[: self.num_places, :, :, : self.num_columns] = self._store
        larger._mask[: self.num_places, : self.num_columns] = self._mask
        return larger

    @classmethod
    def random(
        cls, shape: CacheShape, lengths: Sequence[int], *, num_columns: int, generator: torch.Generator
    ) -> RowCache:
        """Makes a cache with rows of these lengths and made-up keys and values."""
        cache = cls(shape, num_places=len(lengths), num_columns=num_columns)
        cache._store.copy_(torch.randn(cache._store.shape, generator=generator))
        for place, length in enumerate(lengths):
            cache._mask[place, :length] = 0.0
        return cache


class RowLayer(CacheLayerMixin):
    """A layer of a RowCache in the form that transformers' own forward asks for."""

    def __init__(self, cache: RowCache, layer: int) -> None:
        super().__init__()
        self._cache = cache
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the cache is made."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes [N, head, 1, head dimension] of one token a row."""
        return self._cache.extend(self._layer, key_states[:, :, 0], value_states[:, :, 0])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.num_read_columns, 0

    def get_seq_length(self) -> int:
        return self._cache.num_read_columns

    def get_max_length(self) -> int:
        return self._cache.num_columns


def as_transformers_cache(cache: RowCache) -> Cache:
    return Cache(layers=[RowLayer(cache, layer) for layer in range(cache.shape.num_layers)])


def layer_windows(config: Any) -> tuple[int | None, ...] | None:
    """Returns the window of each layer's attention, None for a layer without; or None where a layer keeps something
    else of a row than keys and values by token, or layers have several windows.
    """
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None) or ()
    # Llama 4 looks back to the beginning of a chunk: transformers keeps its keys like those of a window.
    if "chunked_attention" in layer_types or getattr(text_config, "attention_chunk_size", None) is not None:
        return None
    windows: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(layer.sliding_window)
        else:
            return None
    # A forward takes one mask for its full attention, and one for its sliding attention.
    return tuple(windows) if len(set(windows) - {None}) <= 1 else None


def full_cache(config: Any) -> DynamicCache:
    """Returns an empty cache that keeps all tokens in each layer, also behind a sliding window."""
    cache = DynamicCache(config=config)
    cache.layers[:] = [DynamicLayer() for _ in cache.layers]
    return cache


def rounded_up(number: int, to: int = COLUMNS) -> int:
    return -(-number // to) * to
