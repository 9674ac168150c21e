"""The rows of a micro-batch go through a model in one of three layouts.

`padded`, a row for each response, here with prompts [5, 6] and [7], responses [1, 2, 3] and [4] (P = 2, T_max = 3):

    input_ids            [[5, 6, 1, 2], [0, 7, 0, 0]]      a response's last token is never an input
    attention_mask       [[1, 1, 1, 1], [0, 1, 0, 0]]
    position_ids         [[0, 1, 2, 3], [0, 0, 0, 0]]
    predicting           [[1, 2, 3], [5, 0, 0]]            of input_ids flattened

`shared_prompt`, one sequence in which a group's prompt stands once (`SharedPromptLayout`), with the same two rows:

    input_ids            [[5, 6, 1, 2, 7]]
    position_ids         [[0, 1, 2, 3, 0]]
    predicting           [[1, 2, 3], [4, 0, 0]]            a prompt's last token predicts the first of all its responses

`prompt_cache`, a pass for prompts and one behind them for their responses, for prompts of each length (`CachedGroups`):

    prompt_ids           [[5, 6]], [[7]]                   those of 2 tokens, those of 1
    response_ids         [[1, 2]], []                      a response of one token is only predicted
    predicting           [[1, 2, 3], [4, 0, 0]]            of all of these ids in that order: 5, 6, 1, 2, 7

Tokens that were not sampled, a trajectory's observations, are in input_ids like all others; `of_sampled` takes them out
of `predicting`, whose rows are then S_max wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from consumer.model.shared_prompt.attention import attention_arguments
from consumer.model.shared_prompt.layout import GroupLengths, Prefill, SharedPromptLayout
from contracts.errors import ContractViolation
from onbeat.data.kept_sets import unpack_kept_sets
from onbeat.data.sampled_values import FEWEST_ROWS

Tokens = NDArray[np.int32]
Packing = Literal["shared_prompt", "as_sampled", "prompt_cache", "padded"]
"""The layout of a pass: those of a spec (`trainer.packing`), and `prompt_cache`, which stands in for `shared_prompt`
where a model can't take packed sequences."""
FEWEST_COLUMNS = 2
"""Responses go through behind a cache with so many tokens at least: for one, linear attention writes over the state
that the backward pass needs."""


@dataclass(frozen=True, kw_only=True)
class PaddedInputs:
    """The inputs of R rows: prompts padded on the left, responses on the right. `padded_inputs` creates them."""

    input_ids: Tensor
    """int64 [R, P + T_max - 1]."""
    attention_mask: Tensor
    """int64 [R, P + T_max - 1]; 1 where input_ids holds a real token."""
    position_ids: Tensor
    """int64 [R, P + T_max - 1]."""
    prompts_are_padded: bool
    """True where prompts differ in length: only then does causal attention need the mask."""
    predicting: Tensor
    """int64 [R, T_max]: index into input_ids, flattened, of the token whose logits are those of a response token; 0 in
    padding."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns the arguments of the model's forward."""
        # Without left padding causal attention never looks at a padded token, and the maskless kernel is faster.
        inputs = {"input_ids": self.input_ids.to(device)}
        if self.prompts_are_padded:
            inputs["attention_mask"] = self.attention_mask.to(device)
            inputs["position_ids"] = self.position_ids.to(device)
        return inputs


@dataclass(frozen=True, kw_only=True)
class PackedInputs:
    """The inputs of a single sequence of g groups, with each prompt once. `packed_inputs` creates them."""

    input_ids: Tensor
    """int64 [1, L]."""
    position_ids: Tensor
    """int64 [1, L]."""
    groups: tuple[GroupLengths, ...]
    predicting: Tensor
    """int64 [R, T_max], as in PaddedInputs."""
    prefill: Prefill | None = None
    """As in SharedPromptLayout."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """Returns the arguments of the model's forward; `layout` reaches `shared_prompt_attention`."""
        return {
            "input_ids": self.input_ids.to(device),
            "position_ids": self.position_ids.to(device),
            **attention_arguments(SharedPromptLayout(groups=self.groups, device=device, prefill=self.prefill)),
        }


@dataclass(frozen=True, kw_only=True)
class CachedGroups:
    """Prompts of one length, and their responses. `cached_inputs` creates it, and `cached_states` reads it."""

    prompt_ids: Tensor
    """int64 [g, P]."""
    response_ids: Tensor
    """int64 [r, R] of the responses that have input tokens, padded on the right with 0."""
    prompt_of_response: Tensor
    """int64 [r]: row of `prompt_ids` for each row of `response_ids`."""
    longest_response: int
    """Input tokens of the longest response; R is FEWEST_COLUMNS at least where there is any."""

    @property
    def prompt_positions(self) -> Tensor:
        """int64 [g, P]."""
        return torch.arange(self.prompt_ids.shape[1]).expand_as(self.prompt_ids)

    @property
    def response_positions(self) -> Tensor:
        """int64 [r, R]: responses go on behind their prompts; padding stays within the positions of the longest one."""
        columns = torch.arange(self.response_ids.shape[1]).clamp(max=max(0, self.longest_response - 1))
        return (self.prompt_ids.shape[1] + columns).expand_as(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class CachedInputs:
    """The inputs of groups whose prompts go through once, and whose responses go on behind them by the model's cache.

    `cached_inputs` creates them.
    """

    parts: tuple[CachedGroups, ...]
    """By the length of the prompts, ascending."""
    predicting: Tensor
    """int64 [R, T_max], as in PaddedInputs: an index into `input_ids`."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [L] of all parts, one after another: the prompts of a part, and then its responses."""
        return torch.cat([ids.flatten() for part in self.parts for ids in (part.prompt_ids, part.response_ids)])

    @property
    def position_ids(self) -> Tensor:
        """int64 [L], likewise."""
        pairs = [(part.prompt_positions, part.response_positions) for part in self.parts]
        return torch.cat([positions.flatten() for pair in pairs for positions in pair])


ModelInputs = PaddedInputs | PackedInputs | CachedInputs


@dataclass(frozen=True, kw_only=True)
class KeptSets:
    """The set of tokens that each of N sampled tokens was drawn from: its log-prob is normalised over the set."""

    ids: Tensor
    """int64 [K] of all sets, one after another."""
    counts: Tensor
    """int64 [N] ids of each set; 0 stands for the whole vocabulary."""

    @classmethod
    def of(cls, packed: Sequence[bytes], sampled: Sequence[Tokens]) -> KeptSets:
        """Reads the kept sets of all rows.

        Args:
            packed: The sets of each row, as completions have them.
            sampled: int32 [S] of each row, its sampled tokens.

        Raises:
            ContractViolation: For a token that is not in its set, and for another number of sets than of tokens.
        """
        ids, counts = unpack_kept_sets(b"".join(packed))
        tokens = np.concatenate(sampled)
        if len(counts) != len(tokens):
            raise ContractViolation(f"{len(counts)} kept sets are not of {len(tokens)} tokens", field="kept_sets")
        # [K] the number of the token that each id of the flat list belongs to.
        owners = np.repeat(np.arange(len(tokens)), counts)
        num_matches = np.bincount(owners[ids == tokens[owners]], minlength=len(tokens))
        # A count of 0 stands for the whole vocabulary, which has each token.
        if not ((num_matches > 0) | (counts == 0)).all():
            raise ContractViolation("a sampled token is not in its kept set", field="kept_sets")
        return cls(ids=torch.from_numpy(ids), counts=torch.from_numpy(counts))

    def split(self, size: int) -> list[KeptSets]:
        """Cuts after each `size` tokens."""
        counts = self.counts.split(size)
        # The ids lie one set after another: a chunk of sets is a stretch of ids as long as its counts together.
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [KeptSets(ids=part_ids, counts=part_counts) for part_ids, part_counts in zip(ids, counts, strict=True)]

    def left_out(self, vocabulary_size: int, device: torch.device) -> Tensor:
        """Returns bool [N, V], True where a token was not kept."""
        counts = self.counts.to(device)
        owners = torch.arange(len(counts), device=device).repeat_interleave(counts)
        # All tokens of a set that isn't the whole vocabulary, and then again without its members.
        left_out = (counts > 0).unsqueeze(1).repeat(1, vocabulary_size)
        # A set of count 0 has no owner here, and its row was False from the start: all of it may be drawn.
        left_out[owners, self.ids.to(device)] = False
        return left_out


def of_sampled(
    inputs: ModelInputs, places: Sequence[NDArray[np.int64]], lines: Sequence[tuple[int, int]] = ()
) -> ModelInputs:
    """Reduces `predicting` from a row's T response tokens to its S sampled ones.

    Args:
        inputs: Rows of responses, and behind them the lines that began anew.
        places: int64 [S] of each row, ascending: which of its response tokens were sampled.
        lines: (row, place in its response) of the first token that each further row of the inputs predicts, in order:
            they go on with the rows' responses.
    """
    predicting = np.zeros((len(places), max(of_row.size for of_row in places)), dtype=np.int64)
    each = inputs.predicting.numpy()
    # Places behind a row's own line are out of its range: they are cut to it here, and the lines below overwrite them.
    for row, row_places in enumerate(places):
        predicting[row, : row_places.size] = each[row][np.minimum(row_places, each.shape[1] - 1)]
    for line, (row, first) in zip(each[len(places) :], lines, strict=True):
        # Where several lines began anew, a later one overwrites what an earlier one has put behind its own end.
        later = np.flatnonzero(places[row] >= first)
        predicting[row, later] = line[np.minimum(places[row][later] - first, each.shape[1] - 1)]
    return replace(inputs, predicting=torch.from_numpy(predicting))


def padded_inputs(prompts: Sequence[Tokens], responses: Sequence[Tokens]) -> PaddedInputs:
    """Lays prompts and responses out row by row; there is at least one row, and no response is empty."""
    prompt_width = max(prompt.size for prompt in prompts)
    response_width = max(response.size for response in responses)
    # The last token of the longest response is never an input.
    width = prompt_width + response_width - 1
    # 0 in padding: an id that each vocabulary has, and that no real token attends to.
    tokens = np.zeros((len(prompts), width), dtype=np.int64)
    real = np.zeros(tokens.shape, dtype=np.int64)
    predicting = np.zeros((len(prompts), response_width), dtype=np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        # Every prompt ends at column prompt_width.
        span = slice(prompt_width - prompt.size, prompt_width + response.size - 1)
        tokens[row, span] = np.concatenate((prompt, response[:-1]))
        real[row, span] = 1
        # The token before a response token predicts it: the first one's is the prompt's last.
        predicting[row, : response.size] = row * width + prompt_width - 1 + np.arange(response.size)
    return PaddedInputs(
        input_ids=torch.from_numpy(tokens),
        attention_mask=torch.from_numpy(real),
        # Positions count real tokens from 0; left padding, where the count is -1, gets 0.
        position_ids=torch.from_numpy(np.maximum(real.cumsum(axis=1) - 1, 0)),
        # Only prompts decide: padding on the right stands behind all that attends, and causal attention never looks
        # there.
        prompts_are_padded=min(prompt.size for prompt in prompts) < prompt_width,
        predicting=torch.from_numpy(predicting),
    )


def packed_inputs(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    group_index: Sequence[int],
    *,
    prefill: Prefill | None = None,
    multiple_of: int = 1,
) -> PackedInputs:
    """Packs rows behind each other into one sequence; rows of a group stand together and share their prompt.

    Args:
        prompts: int32 of each row.
        responses: int32 of each row, at least one token.
        group_index: The group of each row.
        prefill: As in `SharedPromptLayout`.
        multiple_of: The number that the sequence's length is made a multiple of, by responses that predict nothing.
    """
    predicting = np.zeros((len(prompts), max(response.size for response in responses)), dtype=np.int64)
    pieces: list[Tokens] = []
    positions: list[NDArray[np.int64]] = []
    groups: list[GroupLengths] = []
    end = 0
    for _, numbers in groupby(range(len(prompts)), key=lambda row: group_index[row]):
        rows = list(numbers)
        prompt = prompts[rows[0]]
        # Each response without its last token, which predicts nothing.
        inputs = [responses[row][:-1] for row in rows]
        pieces += [prompt, *inputs]
        # Each response goes on at the position behind its prompt.
        positions += [np.arange(prompt.size), *(prompt.size + np.arange(response.size) for response in inputs)]
        groups.append(
            GroupLengths(prompt_tokens=prompt.size, response_tokens=tuple(response.size for response in inputs))
        )
        end += prompt.size
        last_of_prompt = end - 1
        for row, response in zip(rows, inputs, strict=True):
            # The responses of a group share the token that predicts their first.
            predicting[row, 0] = last_of_prompt
            # `response` is without its last token here: it has response.size inputs and predicts response.size + 1
            # tokens.
            predicting[row, 1 : response.size + 1] = end + np.arange(response.size)
            end += response.size
    # -end modulo n: the tokens up to the next multiple of n, 0 at a multiple.
    missing = -end % multiple_of
    if missing:
        # Token 0 at position 0; no entry of `predicting` points to it, so it has no loss and no gradient.
        rest = np.zeros(missing, dtype=np.int32)
        pieces.append(rest)
        positions.append(rest.astype(np.int64))
        # The backward pass of all responses depends on how long the longest is: as_sampled always had one for the rest.
        longest = max(1, predicting.shape[1] - 1)
        if multiple_of == FEWEST_ROWS:
            longest = missing
        more = [min(longest, missing - start) for start in range(0, missing, longest)]
        groups[-1] = replace(groups[-1], response_tokens=(*groups[-1].response_tokens, *more))
    return PackedInputs(
        input_ids=torch.from_numpy(np.concatenate(pieces).astype(np.int64)[None]),
        position_ids=torch.from_numpy(np.concatenate(positions).astype(np.int64)[None]),
        groups=tuple(groups),
        predicting=torch.from_numpy(predicting),
        prefill=prefill,
    )


def cached_inputs(prompts: Sequence[Tokens], responses: Sequence[Tokens], group_index: Sequence[int]) -> CachedInputs:
    """Lays rows out by the length of their prompts; rows of a group stand together and share their prompt.

    Args:
        prompts: int32 of each row.
        responses: int32 of each row, at least one token.
        group_index: The group of each row.
    """
    predicting = np.zeros((len(prompts), max(response.size for response in responses)), dtype=np.int64)
    rows_of_groups = [list(rows) for _, rows in groupby(range(len(prompts)), key=lambda row: group_index[row])]
    parts: list[CachedGroups] = []
    start = 0
    for length in sorted({prompts[rows[0]].size for rows in rows_of_groups}):
        groups = [rows for rows in rows_of_groups if prompts[rows[0]].size == length]
        part = _cached_groups(
            [prompts[rows[0]] for rows in groups], [[responses[row] for row in rows] for rows in groups]
        )
        parts.append(part)
        # Where the part's responses begin in the inputs flattened, and how far they are apart.
        start_of_responses = start + part.prompt_ids.numel()
        width = part.response_ids.shape[1]
        place = 0
        for number, rows in enumerate(groups):
            for row in rows:
                # A prompt's last token predicts the first of all its responses.
                predicting[row, 0] = start + (number + 1) * length - 1
                num_inputs = responses[row].size - 1
                if num_inputs:
                    predicting[row, 1 : num_inputs + 1] = start_of_responses + place * width + np.arange(num_inputs)
                    place += 1
        start = start_of_responses + part.response_ids.numel()
    return CachedInputs(parts=tuple(parts), predicting=torch.from_numpy(predicting))


def _cached_groups(prompts: Sequence[Tokens], responses: Sequence[Sequence[Tokens]]) -> CachedGroups:
    """Lays out prompts of one length, each with its responses; a response's last token is never an input."""
    inputs = [(number, response[:-1]) for number, of_prompt in enumerate(responses) for response in of_prompt]
    inputs = [(number, tokens) for number, tokens in inputs if tokens.size]
    longest = max((tokens.size for _, tokens in inputs), default=0)
    width = max(longest, FEWEST_COLUMNS) if inputs else 0
    response_ids = np.zeros((len(inputs), width), dtype=np.int64)
    for row, (_, tokens) in zip(response_ids, inputs, strict=True):
        row[: tokens.size] = tokens
    return CachedGroups(
        prompt_ids=torch.from_numpy(np.stack(prompts).astype(np.int64)),
        response_ids=torch.from_numpy(response_ids),
        prompt_of_response=torch.tensor([number for number, _ in inputs], dtype=torch.int64),
        longest_response=longest,
    )
