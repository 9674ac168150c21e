"""A packed sequence gives each token a group, a segment and a position.

Worked example, one group with prompt [5, 6] and responses [1, 2, 3] and [4, 9]; the last token of a response is never
an input, and the last prompt token predicts the first token of both:

    input_ids  [5, 6, 1, 2, 4]                 attends to    5  6  1  2  4
    group      [0, 0, 0, 0, 0]                            5  x
    segment    [0, 0, 1, 1, 2]   0: the prompt            6  x  x
    position   [0, 1, 2, 3, 2]                            1  x  x  x
                                                          2  x  x  x  x
                                                          4  x  x        x

Token i attends to token j where j <= i, both are of one group, and j is of the prompt or of i's own response (arXiv
2511.18871, shared-prompt attention).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from onbeat.data.sampled_values import COLUMNS


@dataclass(frozen=True, kw_only=True)
class GroupLengths:
    """Input tokens of a group: its prompt's, and those of each of its responses in the order of the sequence."""

    prompt_tokens: int
    """At least 1."""
    response_tokens: tuple[int, ...]
    """0 for a response of one token, which is only predicted."""

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.response_tokens)


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """The shape in which a generator took a rollout batch's prompts through the model: together, padded on the left."""

    width: int
    """Tokens of the longest one."""
    is_padded: bool
    """True where they differ in length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedPromptLayout:
    """The groups of one packed sequence, in order; it travels to every attention layer next to the hidden states.

    `PackedInputs.arguments` creates it for one pass of one model. Layers read it, and add to its caches of masks.
    """

    groups: tuple[GroupLengths, ...]
    device: torch.device
    prefill: Prefill | None = None
    """The prefill of the groups' batch, where attention goes as a generator's steps do; None: all at once."""
    windows_seen: list[int | None] = field(default_factory=list)
    """The window of each attention layer that was called, in the order of calls: a trial reads it."""
    response_masks: dict[int | None, Tensor] = field(default_factory=dict)
    """Masks by window, each made once for all layers of that window."""
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)
    """FlexAttention's, likewise."""

    @property
    def num_tokens(self) -> int:
        """L, the length of the sequence."""
        return sum(group.num_tokens for group in self.groups)

    @functools.cached_property
    def own_start(self) -> Tensor:
        """int32 [L]: first token of the prompt or response that a token is of."""
        lengths = [length for group in self.groups for length in (group.prompt_tokens, *group.response_tokens)]
        # The start of each piece, repeated for each of its tokens.
        return self._tensor(np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)).int()

    @functools.cached_property
    def prompt_range(self) -> tuple[Tensor, Tensor]:
        """int32 [L], [L]: first token of a token's prompt, and the one behind its last."""
        lengths = [group.num_tokens for group in self.groups]
        starts = np.array([start for start, _ in self._starts()], dtype=np.int64)
        ends = starts + np.array([group.prompt_tokens for group in self.groups], dtype=np.int64)
        return self._tensor(np.repeat(starts, lengths)).int(), self._tensor(np.repeat(ends, lengths)).int()

    @functools.cached_property
    def position(self) -> Tensor:
        """int64 [L]: the position that a token has where each response stands right behind a prompt of its own."""
        positions: list[NDArray[np.int64]] = []
        for group in self.groups:
            positions.append(np.arange(group.prompt_tokens))
            positions += [group.prompt_tokens + np.arange(length) for length in group.response_tokens]
        return self._tensor(np.concatenate(positions))

    @functools.cached_property
    def prompt_tokens(self) -> Tensor:
        """int64 [g, P]: sequence indices of each prompt, padded on the right with 0."""
        return self._tensor(_padded([range(start, start + group.prompt_tokens) for start, group in self._starts()]))

    @functools.cached_property
    def response_tokens(self) -> Tensor:
        """int64 [r, R]: sequence indices of each response that has input tokens, padded on the right with 0."""
        return self._tensor(_padded([range(start, start + length) for _, start, length in self._responses()]))

    @functools.cached_property
    def prompt_of_response(self) -> Tensor:
        """int64 [r]: row of `prompt_tokens` for each row of `response_tokens`."""
        return self._tensor([number for number, _, _ in self._responses()])

    @functools.cached_property
    def source(self) -> Tensor:
        """int64 [L]: where a token stands in `prompt_tokens` flattened, followed by `response_tokens` flattened."""
        source = np.zeros(self.num_tokens, dtype=np.int64)
        width = max(group.prompt_tokens for group in self.groups)
        for number, (start, group) in enumerate(self._starts()):
            source[start : start + group.prompt_tokens] = number * width + np.arange(group.prompt_tokens)
        responses = self._responses()
        # Responses follow all prompts, each of which takes the width of the longest.
        offset = len(self.groups) * width
        width = max((length for _, _, length in responses), default=0)
        for number, (_, start, length) in enumerate(responses):
            source[start : start + length] = offset + number * width + np.arange(length)
        return self._tensor(source)

    @functools.cached_property
    def prompt_lengths(self) -> Tensor:
        """int64 [g]"""
        return self._tensor([group.prompt_tokens for group in self.groups])

    @functools.cached_property
    def left_padded_prompts(self) -> Tensor:
        """int64 [g, W]: sequence indices of each prompt as `prefill` has it, padded on the left with 0."""
        width = 0
        if self.prefill is not None:
            width = self.prefill.width
        index = np.zeros((len(self.groups), width), dtype=np.int64)
        for row, (start, group) in zip(index, self._starts(), strict=True):
            row[width - group.prompt_tokens :] = start + np.arange(group.prompt_tokens)
        return self._tensor(index)

    @functools.cached_property
    def row_columns(self) -> Tensor:
        """int64 [r, C]: sequence indices of each row, its prompt and its response; 0 in columns without a token.

        C is a multiple of COLUMNS.
        """
        starts = self._starts()
        responses = self._responses()
        longest = max(self.groups[number].prompt_tokens + length for number, _, length in responses)
        # -(-n // m) * m: n rounded up to a multiple of m.
        columns = np.zeros((len(responses), -(-longest // COLUMNS) * COLUMNS), dtype=np.int64)
        for row, (number, at, length) in zip(columns, responses, strict=True):
            start, group = starts[number]
            end = group.prompt_tokens + length
            row[:end] = np.concatenate((start + np.arange(group.prompt_tokens), at + np.arange(length)))
        return self._tensor(columns)

    @functools.cached_property
    def sampled_source(self) -> Tensor:
        """int64 [L]: where a token stands in `left_padded_prompts` flattened, followed by `response_tokens`."""
        source = self.source.cpu().numpy().copy()
        longest = self.prompt_tokens.shape[1]
        width = self.left_padded_prompts.shape[1]
        for number, (start, group) in enumerate(self._starts()):
            # Responses follow g prompts of W columns here, and of P columns in `source`.
            source[start : start + group.num_tokens] += len(self.groups) * (width - longest)
            # A prompt padded on the left ends with its row.
            ends = (number + 1) * width
            source[start : start + group.prompt_tokens] = np.arange(ends - group.prompt_tokens, ends)
        return self._tensor(source)

    def prompt_mask(self, window: int) -> Tensor:
        """Returns bool [P, P]: a token sees itself and the tokens before it, `window` tokens in all."""
        index = torch.arange(self.prompt_tokens.shape[1], device=self.device)
        distance = index[:, None] - index[None, :]
        return (distance >= 0) & (distance < window)

    def response_mask(self, window: int | None) -> Tensor:
        """Returns bool [r, 1, R, P + R]: a response token sees its prompt, itself, and its response before it."""
        if window in self.response_masks:
            return self.response_masks[window]
        width = self.prompt_tokens.shape[1]
        length = self.response_tokens.shape[1]
        prompt_length = self.prompt_lengths[self.prompt_of_response]
        prompt_index = torch.arange(width, device=self.device)
        index = torch.arange(length, device=self.device)
        # All of it is written below: prompt columns [0, P), response columns [P, P + R).
        mask = torch.empty(len(prompt_length), length, width + length, dtype=torch.bool, device=self.device)
        # Keys of the prompt [r, 1, P]: no padding. Keys of the response [R, R]: causal, so that padding is never seen.
        mask[:, :, :width] = (prompt_index < prompt_length[:, None])[:, None, :]
        mask[:, :, width:] = index[:, None] >= index[None, :]
        if window is not None:
            # Response token i stands at position prompt_length + i; a distance below the window is seen.
            mask[:, :, :width] &= prompt_length[:, None, None] + index[:, None] - prompt_index < window
            mask[:, :, width:] &= index[:, None] - index[None, :] < window
        # One mask for all heads.
        self.response_masks[window] = mask[:, None]
        return self.response_masks[window]

    def _starts(self) -> list[tuple[int, GroupLengths]]:
        starts = np.cumsum([0, *(group.num_tokens for group in self.groups)]).tolist()
        return list(zip(starts[:-1], self.groups, strict=True))

    def _responses(self) -> list[tuple[int, int, int]]:
        """Returns (group, index of the first token, tokens) of each response that has input tokens."""
        responses = []
        for number, (start, group) in enumerate(self._starts()):
            # A response of a single token has no input, and no row here.
            at = start + group.prompt_tokens
            for length in group.response_tokens:
                if length:
                    responses.append((number, at, length))
                at += length
        return responses

    def _tensor(self, values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self.device)


def _padded(rows: Sequence[range]) -> NDArray[np.int64]:
    padded = np.zeros((len(rows), max((len(row) for row in rows), default=0)), dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
