"""The steps of a model over a RowCache, one token a row; and the prefill of a batch's prompts, which go through alone.

    prompts [k, P] ─ prefill ─▶ logits [k, V]; keys, values ─▶ G places for each prompt
    tokens [N], positions [N] ─ RowStep ─▶ logits [N, V]

A prompt's numbers depend on the prompts that it is padded with, so a batch's prompts go through the model together and
without any others. A step's don't depend on the rows beside a row, which is what lets batches share it.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from contracts.encoding.arrays import ITEM_BYTES
from contracts.rollouts import PromptBatch
from onbeat.base.group_cache import PAST, cache_argument
from producer.engine.sampling import Logits
from producer.engine.transformers.lean_step import LeanStep, is_lean
from producer.engine.transformers.packed_products import Packing
from producer.engine.transformers.row_cache import CacheShape, RowCache, as_transformers_cache, layer_windows


class RowStep(Protocol):
    """A model's step that takes one token a row. `row_step` creates it for a model; decoders call it."""

    windows: tuple[int | None, ...]
    """[layer] the tokens that a layer looks back, as CacheShape has them."""

    def refresh(self) -> None:
        """Notes that the weights may be others than at the last step."""
        ...

    def release(self) -> None:
        """Gives back what is made of the weights until a step needs it again."""
        ...

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Computes a step: [N] tokens at [N] positions → [N, V] logits after them; the cache has begun the step."""
        ...

    most_fed: int
    """Tokens that `feed` takes at once, of all rows together; it takes one of each row in any case."""

    def feed(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> None:
        """Leaves the keys and values of T tokens a row, [T, N], with the bits that T steps would leave."""
        ...


class OwnStep:
    """A RowStep by transformers' own forward."""

    most_fed = 1

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self.windows = layer_windows(model.config) or ()

    def refresh(self) -> None:
        """Does nothing: nothing is derived from the weights here."""

    def release(self) -> None:
        """Does nothing: it has no memory of its own."""

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        output = self._model(
            input_ids=tokens[:, None],
            attention_mask=_mask_argument(cache),
            position_ids=positions[:, None],
            past_key_values=as_transformers_cache(cache),
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def feed(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> None:
        self(tokens[0], positions[0], cache)


def row_step(model: PreTrainedModel, packing: Packing) -> RowStep | None:
    """Returns the step of a model's rows; None where its layers keep something else of a row than keys and values by
    token.
    """
    config: Any = model.config
    if layer_windows(config) is None:
        return None
    if is_lean(model):
        return LeanStep(model, packing)
    return OwnStep(model) if config._attn_implementation == "sdpa" else None


def _mask_argument(cache: RowCache) -> Tensor | dict[str, Tensor]:
    """Returns a step's mask in the form that transformers' forward takes: one for each kind of layer if there are two.

    A mask of four dimensions keeps the model from making its own.
    """
    masks = {window: of_tokens[0] for window, of_tokens in cache.step_masks.items()}
    if len(masks) == 1:
        return next(iter(masks.values()))
    return {"full_attention" if window is None else "sliding_attention": mask for window, mask in masks.items()}


def left_padded(batch: PromptBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lays out the prompts at the right edge, so that each ends in the last column.

    Returns:
        Token ids [k, P] and mask [k, P]; the mask is 1 at tokens and 0 left of them.
    """
    prompts = [np.frombuffer(prompt.token_ids, dtype="<i4") for prompt in batch.prompts]
    width = max(map(len, prompts))
    token_ids = np.zeros((len(prompts), width), dtype=np.int64)
    mask = np.zeros_like(token_ids)
    for row, prompt in enumerate(prompts):
        token_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return torch.from_numpy(token_ids).to(device), torch.from_numpy(mask).to(device)


def prompt_lengths(batch: PromptBatch) -> list[int]:
    """Returns the length of each prompt in tokens."""
    return [len(prompt.token_ids) // ITEM_BYTES for prompt in batch.prompts]


def forward(model: PreTrainedModel, token_ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
    """Sends new tokens through transformers' own forward.

    Args:
        model: The model.
        token_ids: [N, S] new tokens.
        mask: [N, P] of all tokens so far, of which the last S are new.
        cache: The keys and values of the tokens before.

    Returns:
        [N, V] logits after the last token.
    """
    # A token's position is the number of real tokens before it. Padding, which the mask hides, gets 0, not -1.
    # Only the S columns of the new tokens are needed.
    num_new = token_ids.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)[:, -num_new:]
    argument = cache_argument(type(model))
    if argument != PAST:
        # A model without attention looks at its states and the new tokens alone, and takes the mask of these.
        mask = mask[:, -num_new:]
    run: Any = model
    output = run(
        input_ids=token_ids,
        attention_mask=mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
        **{argument: cache},
    )
    return output.logits[:, -1]


def give_head_whole_inputs(model: PreTrainedModel) -> None:
    """Has the output head of a bfloat16 model take the prompts' last columns in one product.

    They aren't contiguous, so torch would compute a product for each prompt, and copy the head for each: 0.16 s a
    prompt of a vocabulary of 49,152 by 576. The bits are the same (tests/contract/test_row_steps.py) up to 32 prompts;
    AMX may sum those of a larger batch in other blocks, by its number of prompts alone. The bits of float32 would be
    others, and nothing is copied there: such a model is left as it is.
    """
    head = model.get_output_embeddings()
    if model.dtype is torch.bfloat16 and head is not None:
        head.register_forward_pre_hook(lambda _, inputs: tuple(values.contiguous() for values in inputs))


def held_prompts(prompts: DynamicCache) -> Tensor:
    """Joins the keys and values of k prompts: [k, layer, 2, column, head, head dimension].

    Raises:
        ValueError: The layers don't all keep the same of a token.
    """
    layers: list[Any] = prompts.layers
    halves = [half for layer in layers for half in (layer.keys, layer.values)]
    if len({(half.shape, half.dtype) for half in halves}) != 1:
        raise ValueError("its layers keep keys and values of several shapes")
    # Of each, [k, head, column, head dimension].
    return torch.stack(halves, dim=1).unflatten(1, (-1, 2)).transpose(3, 4)


def cache_shape(prompts: Tensor, windows: tuple[int | None, ...]) -> CacheShape:
    """Returns the shape of a cache for prompts as `held_prompts` has them, of layers with these windows."""
    _, num_layers, _, _, num_heads, head_dim = prompts.shape
    return CacheShape(
        num_layers=num_layers,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=prompts.dtype,
        device=prompts.device,
        windows=windows,
    )


def to_draw_from(logits: Tensor) -> Logits:
    """Returns float32 logits; those of a GPU stay there, since draws are faster than their way to the host."""
    return logits.float() if logits.is_cuda else logits.float().numpy()
