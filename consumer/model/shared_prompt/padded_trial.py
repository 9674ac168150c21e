"""A trial of padded rows: a row's states must not come from the padding in front of it.

    [0 0 0 0 0 3 1 4]   short prompt, padded on the left ─▶ its states ─▶ gradient of the embeddings at padding = 0?
    [5 9 2 6 5 3 5 8]   long prompt                                    └▶ those of the row by itself?

An attention mask keeps most architectures from their padding. One that compresses its keys by blocks of positions
counts padding as positions, whatever the mask says. The same pass shows an encoder, which transformers loads as a
causal language model all the same: its states come from the tokens behind them, too.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from consumer.model.inputs import padded_inputs
from consumer.model.language_head import base_causal_lm, has_plain_head, last_states, vocabulary_size
from contracts.errors import InvalidInput

FIELD = "model.path"
PROMPTS = ([3, 1, 4], [5, 9, 2, 6, 5, 3, 5, 8])
RESPONSE = [9, 7, 9, 3, 2]
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest difference relative to the largest state."""
NARROW_TOLERANCE = 0.1
"""The same of the median in a narrower dtype, in which a router may choose another expert for some of the tokens.
DeepSeek-V4 is off by 0.17, and other families by some hundredths at most."""

NEXT_TOKENS_TOLERANCE = 1e-3
"""Largest gradient of a state at a token behind it, relative to the largest at any token: kernels that work by chunks
may leave rounding there."""


def check_padded_rows(model: PreTrainedModel) -> None:
    """Tries a model on rows with padding. Ranks that share it call it at the same time.

    Raises:
        InvalidInput: A padded row isn't what it is by itself, or a token sees those behind it; the error names
            model.path and the cure.
    """
    is_shared = isinstance(model, FSDPModule)
    with torch.enable_grad():
        padded, embedded = _padded_states(model)
        # Ranks sum what a backward pass leaves: where they share a model, states alone are compared.
        if not is_shared and embedded is not None:
            if _looks_ahead(padded, embedded):
                raise _refusal(
                    model, "lets a token see those behind it", "it can't be trained to write one after the other"
                )
            problem = _leak(padded, embedded)
            if problem:
                raise _refusal(model, problem)
    with torch.no_grad():
        tokens = torch.tensor([PROMPTS[0] + RESPONSE[:-1]], device=model.device) % vocabulary_size(model)
        share = _difference(padded.detach(), _states(model, input_ids=tokens)[0])
    # NaN is not above it: a policy that is not finite is refused where its loss is taken, as diverged.
    if share > TOLERANCE.get(padded.dtype, NARROW_TOLERANCE):
        raise _refusal(model, f"gives other states for a padded row than for the row by itself, by {share:.1e}")
    if is_shared:
        # A pass leaves the outermost parameters whole.
        cast(FSDPModule, model).reshard()


def _padded_states(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Returns the states [T, h] of the short row's real tokens, and the embeddings [2, T', h'] of all of them."""
    prompts = [np.array(prompt, dtype=np.int32) % vocabulary_size(model) for prompt in PROMPTS]
    response = np.array(RESPONSE, dtype=np.int32) % vocabulary_size(model)
    inputs = padded_inputs(prompts, [response, response])
    has_plain_head(model)  # its own passes, of the first call, come before the hook
    embedded: list[Tensor] = []
    embedding = cast(nn.Module, model.get_input_embeddings())

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        embedded.append(output)

    hook = embedding.register_forward_hook(note)
    try:
        states = _states(model, **inputs.arguments(model.device))
    finally:
        hook.remove()
    first = len(PROMPTS[1]) - len(PROMPTS[0])
    if not embedded or not embedded[0].requires_grad:
        return states[0, first:], None
    return states[0, first:], embedded[0]


def _states(model: PreTrainedModel, **inputs: Any) -> Tensor:
    if has_plain_head(model):
        return last_states(model, **inputs)
    return model(use_cache=False, **inputs).logits


def _difference(padded: Tensor, alone: Tensor) -> float:
    """Returns how far states are apart, as a share of how large they are."""
    apart = (padded - alone).abs().double()
    size = alone.abs().double()
    if padded.dtype in TOLERANCE:
        return float(apart.max() / size.max())
    return float(apart.median() / size.median())


def _looks_ahead(states: Tensor, embedded: Tensor) -> bool:
    """Returns True where the states before the short row's last token come from that token's embedding."""
    # The graph is kept for `_leak`.
    (gradient,) = torch.autograd.grad(
        states[:-1].float().square().sum(), embedded, allow_unused=True, retain_graph=True
    )
    if gradient is None:
        return False
    sizes = gradient[0].abs()
    # NaN is not above it.
    return bool(sizes[-1].max() > NEXT_TOKENS_TOLERANCE * sizes.max())


def _leak(states: Tensor, embedded: Tensor) -> str:
    """Returns a problem where the states of the short row come from its padding's embeddings; "" where none do."""
    (gradient,) = torch.autograd.grad(states.float().square().sum(), embedded, allow_unused=True)
    if gradient is None:
        return ""
    padding = gradient[0, : len(PROMPTS[1]) - len(PROMPTS[0])]
    # Masked weights are 0, and so is what goes back through them. NaN is not above 0.
    if bool((padding.abs() > 0).any()):
        return "looks at the padding in front of a row"
    return ""


def _refusal(
    model: PreTrainedModel, problem: str, consequence: str = "padded rows can't be trained right"
) -> InvalidInput:
    return InvalidInput(
        f"{type(base_causal_lm(model)).__name__} {problem}, so that {consequence}",
        field=FIELD,
        cure="name a model of another family; docs/models.md lists them",
    )
