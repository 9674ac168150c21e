"""Claims about a family of models, each checked on a model in memory: of its decoding, and of its shared prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from producer.engine.transformers.decoding import Decoding

LENGTHS = (9, 2, 6)
"""Tokens of each prompt; two of them are shorter than a window of 4 is long, or than a convolution of 4 inputs."""
GROUP_SIZE = 4
NUM_STEPS = 6
LEAVE_AT = 3
"""The step before which some rows leave."""
STAYING = np.array([0, 1, 2, 3, 5, 7, 8, 10])
DECODE_TOLERANCE = 1e-5
"""A share of the largest logit: a step and a whole row go by other kernels."""

Steps = list[tuple[np.ndarray, Tensor]]
"""Of each step the rows [N] that it holds, and their logits [N, V]."""


def decodes(model: PreTrainedModel) -> str:
    """Decodes prompts of several lengths by groups, as the transformers engine does, with rows that leave.

    Returns:
        The first fault: logits that aren't those of the row by itself, or that aren't the same bits again; "" for none.
    """
    prompts, tokens = _prompts_and_tokens(model)
    steps = _steps(model, prompts, tokens)
    for number, ((rows, logits), (_, again)) in enumerate(zip(steps, _steps(model, prompts, tokens), strict=True)):
        if not torch.equal(logits, again):
            return f"step {number} has other bits when it is computed again"
        for place, row in enumerate(rows.tolist()):
            whole_row = torch.cat((prompts[row // GROUP_SIZE], tokens[row, :number]))
            with torch.no_grad():
                expected = _run(model)(input_ids=whole_row[None], use_cache=False).logits[0, -1]
            share = float((logits[place] - expected).abs().max() / expected.abs().max())
            if not share <= DECODE_TOLERANCE:
                return f"step {number} gives row {row} logits that are {share:.1e} of the largest away from its own"
    return ""


def _prompts_and_tokens(model: PreTrainedModel) -> tuple[list[Tensor], Tensor]:
    """Returns the prompts, and the tokens [k * G, T] that follow them."""
    draw = torch.Generator().manual_seed(1)
    vocabulary: int = model.config.get_text_config().vocab_size
    prompts = [torch.randint(3, vocabulary, (length,), generator=draw) for length in LENGTHS]
    return prompts, torch.randint(3, vocabulary, (len(LENGTHS) * GROUP_SIZE, NUM_STEPS), generator=draw)


@torch.inference_mode()
def _steps(model: PreTrainedModel, prompts: list[Tensor], tokens: Tensor) -> Steps:
    width = max(LENGTHS)
    token_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    decoding = Decoding(model, token_ids, mask, max_new_tokens=NUM_STEPS)
    rows = np.arange(len(tokens))
    steps = [(rows, torch.as_tensor(decoding.prefill(GROUP_SIZE)).clone())]
    for number in range(NUM_STEPS):
        if number == LEAVE_AT:
            rows = rows[STAYING]
            decoding.keep(STAYING)
        steps.append((rows, torch.as_tensor(decoding.step(tokens[rows, number].numpy())).clone()))
    return steps


def _run(model: PreTrainedModel) -> Any:
    return model
