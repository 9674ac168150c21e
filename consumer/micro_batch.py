"""One rollout batch as tensors: left-padded prompts, right-padded responses.

Worked example, two rows with prompts [5, 6] and [7], responses [1, 2, 3] and [4] (P = 2, T_max = 3, pad = 0):

    input_ids            [[5, 6, 1, 2], [0, 7, 4, 0]]      the last response token is never an input
    attention_mask       [[1, 1, 1, 1], [0, 1, 1, 0]]
    position_ids         [[0, 1, 2, 3], [0, 0, 1, 1]]
    response_ids         [[1, 2, 3], [4, 0, 0]]
    loss_mask            [[1, 1, 1], [1, 0, 0]]
    the logits of the last T_max input positions are those of response_ids
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contracts.rollouts import RolloutBatch


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """R rows of one rollout batch, in the order of the batch."""

    input_ids: Tensor
    """int64 [R, P + T_max - 1]."""
    attention_mask: Tensor
    """int64 [R, P + T_max - 1]; 1 where input_ids holds a real token."""
    position_ids: Tensor
    """int64 [R, P + T_max - 1]; 0 at a row's first prompt token."""
    prompts_are_padded: bool
    """Prompts differ in length: only then does causal attention need the mask."""
    response_ids: Tensor
    """int64 [R, T_max]; 0 where loss_mask is False."""
    loss_mask: Tensor
    """bool [R, T_max]; True on sampled tokens."""
    generator_logprobs: Tensor
    """float32 [R, T_max]; 0.0 where loss_mask is False."""
    advantages: Tensor
    """float64 [R]; the loss rounds them to the dtype of the log-probs."""
    group_index: Tensor
    """int64 [R]; the row's group in the rollout batch."""


def batch_rewards(batch: RolloutBatch) -> NDArray[np.float64]:
    """float64 [k, G] rewards, in the order of the batch."""
    return np.array([[rollout.reward for rollout in group.rollouts] for group in batch.groups], dtype=np.float64)


def rows_that_teach(advantages: NDArray[np.float64], *, every_row: bool) -> NDArray[np.int64]:
    """Rows whose gradient can differ from zero: those of nonzero advantage, or all of them under a KL or entropy term.

    advantages: [k, G]; answers flat row numbers, ascending. Left-out rows contribute exactly 0 to the summed loss.
    """
    flat = advantages.reshape(-1)
    return np.arange(flat.size) if every_row else np.flatnonzero(flat)


def make_micro_batch(
    batch: RolloutBatch, *, advantages: NDArray[np.float64], rows: NDArray[np.int64] | None = None
) -> MicroBatch:
    """Decodes the chosen rows (default: all); P and T_max are the longest prompt and response among them.

    advantages: [k, G]. At least one row.
    """
    size = batch.group_size
    chosen = range(batch.num_completions) if rows is None else rows.tolist()
    if not chosen:
        raise ValueError("a micro-batch needs at least one row")
    group_index = [row // size for row in chosen]
    completions = [batch.groups[row // size].rollouts[row % size].completion for row in chosen]
    decoded = [np.frombuffer(group.prompt_token_ids, dtype="<i4") for group in batch.groups]
    prompts = [decoded[index] for index in group_index]
    responses = [np.frombuffer(completion.token_ids, dtype="<i4") for completion in completions]
    logprobs = [np.frombuffer(completion.generator_logprobs, dtype="<f4") for completion in completions]

    prompt_width = max(prompt.size for prompt in prompts)
    response_width = max(response.size for response in responses)
    tokens = np.zeros((len(prompts), prompt_width + response_width), dtype=np.int64)
    real = np.zeros(tokens.shape, dtype=np.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        span = slice(prompt_width - prompt.size, prompt_width + response.size)
        tokens[row, span] = np.concatenate((prompt, response))
        real[row, span] = 1
    inputs, mask = tokens[:, :-1], real[:, :-1]
    return MicroBatch(
        input_ids=_tensor(inputs),
        attention_mask=_tensor(mask),
        position_ids=_tensor(np.maximum(mask.cumsum(axis=1) - 1, 0)),
        prompts_are_padded=min(prompt.size for prompt in prompts) < prompt_width,
        response_ids=_tensor(tokens[:, prompt_width:]),
        loss_mask=_tensor(real[:, prompt_width:] == 1),
        generator_logprobs=_tensor(_right_padded(logprobs, response_width)),
        advantages=_tensor(advantages.reshape(-1)[chosen]),
        group_index=torch.tensor(group_index),
    )


def _right_padded(rows: Sequence[NDArray[np.float32]], width: int) -> NDArray[np.float32]:
    padded = np.zeros((len(rows), width), dtype=np.float32)
    for row, values in enumerate(rows):
        padded[row, : values.size] = values
    return padded


def _tensor(values: NDArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))
