"""A model's cache is tried: a small group that goes through behind it must have the states and gradients of its rows.

    prompt ─▶ cache ─▶ responses, padded     ─▶ last hidden states ─┬─ the same to the dtype's precision?
    prompt and response, each row by itself  ─▶ last hidden states ─┘  and the prompt's gradient, through the cache?

One response is changed, too: where that changes a bit of another one, a row's bits depend on what is next to it, as in
a mixture of experts, whose products have as many rows as chose an expert. That is no fault, and is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.model.inputs import CachedGroups, cached_inputs
from consumer.model.language_head import base_causal_lm, has_plain_head, last_states, vocabulary_size
from consumer.model.shared_prompt.cached import cached_states
from consumer.model.shared_prompt.trial import TOLERANCE
from contracts.errors import first_line
from onbeat.base.experts import has_experts
from onbeat.base.group_cache import group_cache, unknown_layers

PROMPT = [3, 1, 4, 1, 5, 9, 2]
RESPONSES = [[6, 5, 3, 5, 8, 9], [7, 9, 3], [2, 3, 8, 4, 6]]
"""Longer than the windows and convolutions of tiny models, and of several lengths."""
OTHER_RESPONSE = [1, 2, 2, 7, 1, 3]
"""Takes the first one's place."""
OWN_BITS = "a changed neighbour changes no bit of a row"
SHARED_BITS = "a row's last bits depend on the rows next to it"


@dataclass(frozen=True, kw_only=True)
class CacheTrial:
    """The outcome of `try_cache`."""

    problem: str = ""
    """Why prompts can't be shared by the cache; "" where they can."""
    company: str = OWN_BITS
    """OWN_BITS or SHARED_BITS."""


def try_cache(model: PreTrainedModel) -> CacheTrial:
    """Tries a group behind the model's cache. It leaves no gradient, and the model as it was."""
    causal_lm = base_causal_lm(model)
    name = type(causal_lm).__name__
    try:
        unknown = unknown_layers(group_cache(causal_lm.config))
        if unknown:
            return CacheTrial(problem=f"{name} keeps {', '.join(unknown)} in its cache, which can't be repeated by row")
        if not has_plain_head(model):
            return CacheTrial(problem=f"{name} does not make its logits from its last hidden states by its head alone")
        problem = _difference(model)
        if problem:
            return CacheTrial(problem=f"{name} gives other {problem} behind its cache than for its rows by themselves")
        return CacheTrial(company=_company(model))
    except MemoryError:
        raise
    except Exception as error:
        # An architecture whose forward takes no several tokens behind a cache may raise anything.
        return CacheTrial(problem=f"{name} takes no responses behind its cache: {first_line(error)}")


def _difference(model: PreTrainedModel) -> str:
    """Says what differs, states or gradients; "" for neither."""
    rows = [_tokens(model, PROMPT + response) for response in RESPONSES]
    with torch.enable_grad():
        with _embedded(model) as embedded:
            alone = [last_states(model, input_ids=row[None])[0, len(PROMPT) - 1 :] for row in rows]
            gradients = torch.autograd.grad(_weighed(alone), embedded)
        # Each row has the prompt in its first columns.
        expected_gradient = sum(gradient[0, : len(PROMPT)] for gradient in gradients)
        with _embedded(model) as embedded:
            shared = _behind_cache(model, RESPONSES)
            # The first embedding is the prompt's.
            gradient = torch.autograd.grad(_weighed(shared), embedded[0])[0][0]
    for one_alone, one_shared in zip(alone, shared, strict=True):
        if _is_apart(one_shared, one_alone):
            return "states"
    if _is_apart(gradient, torch.as_tensor(expected_gradient)):
        return "gradients"
    return ""


@torch.no_grad()
def _company(model: PreTrainedModel) -> str:
    """Returns OWN_BITS or SHARED_BITS."""
    if has_experts(model):
        # The number of rows that choose an expert depends on the tokens: a comparison of some tokens proves nothing.
        return SHARED_BITS
    before = _behind_cache(model, RESPONSES)
    after = _behind_cache(model, [OTHER_RESPONSE, *RESPONSES[1:]])
    are_own = all(torch.equal(first, second) for first, second in zip(before[1:], after[1:], strict=True))
    return OWN_BITS if are_own else SHARED_BITS


def _behind_cache(model: PreTrainedModel, responses: list[list[int]]) -> list[Tensor]:
    """Returns [1 + R, h] of each response: the states of its prompt's last token and of its own R tokens."""
    groups = _groups(model, responses)
    prompts, states = cached_states(model, groups)
    last_of_prompt = prompts[0, -1:]
    return [
        torch.cat((last_of_prompt, of_response[: len(response)]))
        for response, of_response in zip(responses, states, strict=True)
    ]


def _groups(model: PreTrainedModel, responses: list[list[int]]) -> CachedGroups:
    """Lays the trial's group out as a pass would."""
    prompt = _tokens(model, PROMPT).cpu().numpy().astype(np.int32)
    # A response's last token is never an input: one more stands behind each.
    rows = [_tokens(model, [*response, 0]).cpu().numpy().astype(np.int32) for response in responses]
    (groups,) = cached_inputs([prompt] * len(rows), rows, [0] * len(rows)).parts
    return groups


@contextmanager
def _embedded(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collects the embeddings of each forward inside, as leaves that a gradient can be taken of, frozen models' too."""
    embedded: list[Tensor] = []

    def cut(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    embedding: Any = model.get_input_embeddings()
    hook = embedding.register_forward_hook(cut)
    try:
        yield embedded
    finally:
        hook.remove()


def _weighed(states: list[Tensor]) -> Tensor:
    """Sums the states with a weight of its own for each number."""
    numbers = torch.cat([of_row.flatten() for of_row in states]).float()
    weights = torch.cos(torch.arange(len(numbers), dtype=torch.float32, device=numbers.device))
    return (numbers * weights).sum()


def _is_apart(actual: Tensor, expected: Tensor) -> bool:
    largest = TOLERANCE.get(expected.dtype, 0.1) * expected.abs().max()
    # NaN is not above it: a policy that is not finite is refused where its loss is taken, as diverged.
    return bool((actual - expected).abs().max() > largest)


def _tokens(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, device=model.device) % vocabulary_size(model)
