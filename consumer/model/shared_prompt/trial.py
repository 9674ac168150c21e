"""A model is turned to packed sequences, or refused with the reason why it can't take them.

A trial decides: the last hidden states of a small packed group must be those of its rows by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.model.language_head import base_causal_lm, has_plain_head, last_states, vocabulary_size
from consumer.model.shared_prompt.attention import NOT_PACKED, SHARED_PROMPT, attention_arguments
from consumer.model.shared_prompt.layout import GroupLengths, SharedPromptLayout
from contracts.errors import InvalidInput, first_line

FIELD = "trainer.packing"
KNOWN_LAYERS = {"full_attention", "sliding_attention"}
VECTORS = 32
"""Numbers of two vectors, which a CPU takes at a time; what is left over goes by other instructions."""
TRIAL_PROMPT = [3, 1, 4]
TRIAL_RESPONSES = [[1, 5, 2], [6, 5]]
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference relative to the largest state; 0.1 for another dtype. A wrong mask is off by as much as that."""


def share_prompts(model: PreTrainedModel) -> None:
    """Has the model take packed sequences as well from now on; a model that does already is left alone.

    Raises InvalidInput that names `trainer.packing` and the reason for an architecture that can't.
    """
    causal_lm = base_causal_lm(model)
    before = causal_lm.config._attn_implementation
    if before == SHARED_PROMPT:
        return
    _check_parts(causal_lm)
    expected = [_alone(model, TRIAL_PROMPT + response) for response in TRIAL_RESPONSES]
    causal_lm.set_attn_implementation(SHARED_PROMPT)
    if causal_lm.config._attn_implementation != SHARED_PROMPT:
        raise _refusal(causal_lm, "does not take its attention from transformers' attention interface")
    try:
        _try(model, expected)
    except InvalidInput:
        causal_lm.set_attn_implementation(before or "eager")
        raise


def check_as_sampled(model: PreTrainedModel, device: torch.device) -> None:
    """Raises InvalidInput where passes can't have the bits of a generator's steps."""
    cure = 'set trainer.packing = "shared_prompt"'
    if device.type != "cpu":
        raise InvalidInput(f"as_sampled is of passes on a CPU, and these are on {device}", field=FIELD, cure=cure)
    causal_lm = base_causal_lm(model)
    config = causal_lm.config.get_text_config()
    if getattr(config, "intermediate_size", 0) % VECTORS:
        problem = (
            f"has an MLP of {config.intermediate_size}, not a multiple of {VECTORS}: its prompts' bits depend on it"
        )
        raise InvalidInput(f"{type(causal_lm).__name__} {problem}", field=FIELD, cure=cure)


def _check_parts(causal_lm: PreTrainedModel) -> None:
    layer_types = getattr(causal_lm.config.get_text_config(), "layer_types", None) or ()
    others = sorted(set(layer_types) - KNOWN_LAYERS)
    if others:
        raise _refusal(causal_lm, f"has layers of type {', '.join(others)}")
    # Known before any pass: ranks that share a model don't get out of one by an exception.
    if getattr(causal_lm.config.get_text_config(), NOT_PACKED["softcap"], None) is not None:
        raise _refusal(causal_lm, f"has {NOT_PACKED['softcap']}, which can't be computed over a packed sequence")
    if any(name.endswith(".sinks") for name, _ in causal_lm.named_parameters()):
        raise _refusal(causal_lm, f"has {NOT_PACKED['s_aux']}, which can't be computed over a packed sequence")
    if not has_plain_head(causal_lm):
        raise _refusal(causal_lm, "does not make its logits from its last hidden states by its head alone")


@torch.no_grad()
def _try(model: PreTrainedModel, expected: list[Tensor]) -> None:
    causal_lm = base_causal_lm(model)
    groups = (GroupLengths(prompt_tokens=len(TRIAL_PROMPT), response_tokens=tuple(map(len, TRIAL_RESPONSES))),)
    layout = SharedPromptLayout(groups=groups, device=model.device)
    tokens = TRIAL_PROMPT + [token for response in TRIAL_RESPONSES for token in response]
    try:
        arguments = {"position_ids": layout.position[None], **attention_arguments(layout)}
        packed = last_states(model, input_ids=_tokens(model, tokens)[None], **arguments)[0]
    except (InvalidInput, MemoryError):
        raise
    except Exception as error:
        # An architecture whose forward takes no such sequence may raise anything.
        raise _refusal(causal_lm, f"does not take a packed sequence: {first_line(error)}") from error
    config = causal_lm.config.get_text_config()
    if len(layout.windows_seen) != config.num_hidden_layers:
        takers = f"{len(layout.windows_seen)} of its {config.num_hidden_layers} layers"
        raise _refusal(causal_lm, f"has {takers} that take their attention from transformers' attention interface")
    slides = _num_sliding_layers(config)
    # A layer that keeps its window to itself would look back too far in a packed sequence.
    if sum(window is not None for window in layout.windows_seen) != slides:
        raise _refusal(causal_lm, f"does not tell {slides} of its layers their sliding window")
    at = len(TRIAL_PROMPT)
    for response, alone in zip(TRIAL_RESPONSES, expected, strict=True):
        # The prompt's states, computed once, and this response's own.
        states = torch.cat((packed[: len(TRIAL_PROMPT)], packed[at : at + len(response)]))
        largest = TOLERANCE.get(alone.dtype, 0.1) * alone.abs().max()
        # NaN is not above it: a policy that is not finite is refused where its loss is taken, as diverged.
        if bool((states - alone).abs().max() > largest):
            raise _refusal(causal_lm, "gives other states for a packed sequence than for its rows by themselves")
        at += len(response)


def _num_sliding_layers(config: Any) -> int:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return layer_types.count("sliding_attention")
    # A config without layer types has the same attention in each layer.
    if getattr(config, "sliding_window", None) is None:
        return 0
    return config.num_hidden_layers


@torch.no_grad()
def _alone(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return last_states(model, input_ids=_tokens(model, tokens)[None])[0]


def _tokens(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return torch.tensor(tokens, device=model.device) % vocabulary_size(model)


def _refusal(causal_lm: PreTrainedModel, problem: str) -> InvalidInput:
    return InvalidInput(f"{type(causal_lm).__name__} {problem}", field=FIELD, cure='set trainer.packing = "padded"')
