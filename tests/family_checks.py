"""Claims about a family of models, each checked on a model in memory: of its decoding, and of its shared prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import MicroBatch, Packing, make_micro_batch
from consumer.model.shared_prompt.passes import Passes, choose_passes
from contracts.rollouts import RolloutBatch
from contracts.spec.trainer import TrainerSpec
from producer.engine.transformers.decoding import Decoding
from tests.builders import rollout_batch

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
"""Rows [N] that a step holds, and their logits [N, V], for each step."""


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


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """How a family's prompts are shared, and how far that is from rows by themselves. `shared_prompt` measures it."""

    passes: Passes
    logprobs: float
    """The largest difference of a log-prob, in nats."""
    gradients: float
    """The largest difference of a number of a gradient, as a share of the largest number of that parameter's."""
    gradients_of: str
    """The parameter that has it."""
    is_repeatable: bool
    """True where a second pass had the same bits."""


def shared_prompt(model: PreTrainedModel) -> SharedPrompt:
    """Passes three groups through a model as a trainer would by default, and each of their rows by itself."""
    passes = choose_passes(model, TrainerSpec(), torch.device("cpu"))
    batch = group_batch(model)
    expected, expected_gradients = measured(model, [part_of(batch, [row]) for row in range(batch.num_completions)])
    whole = part_of(batch, range(batch.num_completions), packing=passes.packing)
    actual, gradients = measured(model, [whole])
    again, gradients_again = measured(model, [whole])
    shares = {
        name: float((gradient - expected_gradients[name]).abs().max() / (expected_gradients[name].abs().max() + 1e-9))
        for name, gradient in gradients.items()
    }
    worst = max(shares, key=lambda name: shares[name])
    return SharedPrompt(
        passes=passes,
        logprobs=float((actual - expected).abs().max()),
        gradients=shares[worst] if gradients.keys() == expected_gradients.keys() else float("inf"),
        gradients_of=worst,
        is_repeatable=torch.equal(actual, again)
        and all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items()),
    )


def group_batch(model: PreTrainedModel) -> RolloutBatch:
    """Returns three groups of four; prompts of 2 to 9 tokens, responses of 1 to 7."""
    vocabulary: int = model.config.get_text_config().vocab_size
    assert vocabulary >= 79, "the tokens of the batch are below 79"
    return rollout_batch(seed=3, num_groups=3, prompt_tokens=(2, 9), response_tokens=(1, 7), rewards=(0.0, 0.5, 1.0))


def part_of(batch: RolloutBatch, rows: Sequence[int], *, packing: Packing = "padded") -> MicroBatch:
    advantages = np.zeros((len(batch.groups), batch.group_size))
    return make_micro_batch(batch, advantages=advantages, rows=np.array(rows), packing=packing)


def measured(model: PreTrainedModel, parts: Sequence[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the log-probs [N] of all tokens, row by row, and the gradients of a sum that weighs each differently."""
    model.zero_grad(set_to_none=True)
    logprobs: list[Tensor] = []
    num_before = 0
    for part in parts:
        values = response_logprobs(model, part, 0.7)[part.loss_mask]
        weights = torch.cos(torch.arange(num_before, num_before + len(values), dtype=torch.float32))
        (values * weights).sum().backward()
        logprobs.append(values.detach())
        num_before += len(values)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return torch.cat(logprobs), gradients


def _run(model: PreTrainedModel) -> Any:
    return model
