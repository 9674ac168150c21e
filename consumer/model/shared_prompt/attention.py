"""Attention over a packed sequence, behind transformers' attention interface: no model code is touched.

CPU: the prompts once, causally, then every response against its prompt and itself: the pairs that the mask allows, up
to padding to the longest prompt and response, without an L x L mask. CUDA: FlexAttention with a block mask, compiled
once for all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from consumer.model.shared_prompt.as_sampled import attention_as_sampled
from consumer.model.shared_prompt.layout import SharedPromptLayout
from contracts.errors import InvalidInput

BLOCK = 128
"""Tokens a side of what FlexAttention computes or leaves out as one."""
MASK_ROWS = 8 * BLOCK
"""Queries whose part of the mask exists at a time: 32 MB at 32,768 tokens, of which the whole mask is 1 GiB."""
SHARED_PROMPT = "shared_prompt"
"""The name under which a model finds `shared_prompt_attention`."""
NOT_PACKED = {"softcap": "attn_logit_softcapping", "s_aux": "attention sinks", "position_bias": "position biases"}
"""Arguments that some architectures hand to their attention → their names in a config or paper."""


def shared_prompt_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SharedPromptLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns [1, L, H, D], like every attention function of transformers, and no weights.

    Args:
        module: The attention layer.
        query: [1, H, L, D].
        key: [1, H_kv, L, D].
        value: [1, H_kv, L, D].
        attention_mask: The model's mask, which is read without a layout alone.
        layout: The packed sequence's; without it this is SDPA with the model's mask.
        scaling: The factor of the scores; None for 1 / sqrt(D).
        sliding_window: Tokens that this layer looks back, by position, itself included; None for all.
        options: Other arguments that the architecture hands to its attention.

    Raises:
        InvalidInput: For options that neither kernel has an argument for.
    """
    if layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    layout.windows_seen.append(sliding_window)
    for option, name in NOT_PACKED.items():
        if options.get(option) is not None:
            raise InvalidInput(
                f"{name} of this model cannot be computed over a packed sequence",
                field="trainer.packing",
                cure='set trainer.packing = "padded"',
            )
    if query.is_cuda:
        attended = _compiled()(
            query,
            key,
            value,
            block_mask=block_mask(layout, sliding_window),
            scale=scaling,
            enable_gqa=True,
            kernel_options={"BACKEND": "TRITON"},
        )
        return attended.transpose(1, 2).contiguous(), None
    split = functools.partial(_split_attention, layout=layout, scaling=scaling, window=sliding_window)
    if layout.prefill is not None:
        attended = attention_as_sampled(
            query, key, value, layout, scaling=scaling, window=sliding_window, blocked=split
        )
        return attended, None
    return split(query, key, value), None


AttentionInterface.register(SHARED_PROMPT, shared_prompt_attention)
AttentionMaskInterface.register(SHARED_PROMPT, sdpa_mask)


def attention_arguments(layout: SharedPromptLayout) -> dict[str, Any]:
    """Returns arguments of a model's forward, which hands them on to its layers.

    A mask of four dimensions keeps the model from making its own.
    """
    return {"layout": layout, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=layout.device)}


def block_mask(layout: SharedPromptLayout, window: int | None) -> BlockMask:
    """Returns the layout's mask for FlexAttention; blocks without a pair are not computed."""
    if window not in layout.block_masks:
        own_start = layout.own_start
        prompt_start, prompt_end = layout.prompt_range
        position = layout.position

        def may_see(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # Causal: what is before it in its own prompt or response, and in the prompt of its group.
            # No operation in place: FlexAttention compiles this into its kernel, and takes none there.
            in_prompt = (key >= prompt_start[query]) & (key < prompt_end[query])
            seen = (key <= query) & ((key >= own_start[query]) | in_prompt)
            if window is None:
                return seen
            return seen & (position[query] - position[key] < window)

        layout.block_masks[window] = _by_blocks(may_see, layout.num_tokens, layout.device)
    return layout.block_masks[window]


def _by_blocks(may_see: Callable[..., Tensor], size: int, device: torch.device) -> BlockMask:
    """Computes torch's `create_block_mask` of a size x size mask, without the memory for all of it at once."""
    keys = torch.arange(size, device=device)
    counts: list[Tensor] = []
    for start in range(0, size, MASK_ROWS):
        queries = torch.arange(start, min(start + MASK_ROWS, size), device=device)
        # -n % BLOCK fills up to a whole block; what is filled up is never seen.
        seen = pad(may_see(0, 0, queries[:, None], keys), (0, -size % BLOCK, 0, -len(queries) % BLOCK))
        counts.append(seen.view(-1, BLOCK, seen.shape[1] // BLOCK, BLOCK).sum((1, 3), dtype=torch.int32))
    pairs = torch.cat(counts)[None, None]
    # A full block needs no mask; a padded one is never full, and is masked.
    is_full = pairs == BLOCK * BLOCK
    return BlockMask.from_kv_blocks(
        *_first_the_computed(~is_full & (pairs > 0)),
        *_first_the_computed(is_full),
        BLOCK_SIZE=BLOCK,
        mask_mod=may_see,
        seq_lengths=(size, size),
    )


def _first_the_computed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int32 [1, 1, Q], how many blocks of a row are True, and int32 [1, 1, Q, K], their numbers before others'.

    blocks: bool [1, 1, Q, K].
    """
    # Stable: the blocks that are computed stay in ascending order, and so does the order of their sums (I7).
    numbers = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.int()


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Returns FlexAttention's kernel, the same for all lengths.

    A trainer that is killed begins again in the middle of a job: compiled for the lengths that a process meets first,
    or with the kernel for short queries that torch takes below 128 tokens, its bits would depend on where it began
    (I7). That kernel is also missing for 65 to 127 tokens where heads share keys.
    """
    return torch.compile(flex_attention, dynamic=True)


class _WideBackward(torch.autograd.Function):
    """SDPA on a CPU whose backward pass is computed in float32, and rounded once to the inputs' bfloat16.

    torch's kernel for that pass takes four to six times as long in bfloat16, also where the CPU has instructions for
    it. The forward pass stays the generator's own, bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.options = options
        return scaled_dot_product_attention(query, key, value, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wide = [inputs.detach().float().requires_grad_() for inputs in ctx.saved_tensors]
        with torch.enable_grad():
            attended = scaled_dot_product_attention(*wide, **ctx.options)
        wide_gradients = torch.autograd.grad(attended, wide, gradients[0].float())
        # float32 → bfloat16 once; None for `options`.
        return *(gradient.to(gradients[0].dtype) for gradient in wide_gradients), None


def _attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    if query.dtype is torch.bfloat16:
        attended: Tensor = _WideBackward.apply(query, key, value, options)
        return attended
    return scaled_dot_product_attention(query, key, value, **options)


def _split_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: SharedPromptLayout, *, scaling: float | None, window: int | None
) -> Tensor:
    """Computes attention of prompts [g, H, P, D] in themselves, of responses [r, H, R, D] to keys [r, H_kv, P + R, D].

    Padding stands on the right of P and R. A padded query's output is not taken up (`source`). A padded key of a prompt
    is behind every query of that prompt, and masked for responses; one of a response is behind its queries.
    """
    if window is not None and int(layout.position.max()) < window:
        # No token looks back as far as the window, and a plain causal kernel needs no mask.
        window = None
    grouped = query.shape[1] != key.shape[1]
    prompt_mask: Tensor | None = None
    if window is not None:
        prompt_mask = layout.prompt_mask(window)

    def rows(heads: Tensor, index: Tensor) -> Tensor:
        """Returns [rows, H, width, D] of heads [1, H, L, D], for the tokens in index [rows, width]."""
        # [L, H * D] by token, then [rows, width, H, D]: shape[1::2] is (H, D).
        tokens = heads[0].transpose(0, 1).flatten(1).index_select(0, index.reshape(-1))
        return tokens.view(*index.shape, *heads.shape[1::2]).transpose(1, 2)

    prompt_keys, prompt_values = (rows(heads, layout.prompt_tokens) for heads in (key, value))
    prompts = _attend(
        rows(query, layout.prompt_tokens),
        prompt_keys,
        prompt_values,
        attn_mask=prompt_mask,
        is_causal=window is None,
        scale=scaling,
        enable_gqa=grouped,
    )
    # [g * P, H * D], as `layout.source` counts; the responses' [r * R, H * D] follow.
    parts = [prompts.transpose(1, 2).flatten(2).flatten(0, 1)]
    if layout.response_tokens.numel():
        owner = layout.prompt_of_response
        responses = _attend(
            rows(query, layout.response_tokens),
            # [r, H_kv, P + R, D]: the prompt's columns first, padding included, then the response's, as `response_mask`
            # counts them.
            torch.cat((prompt_keys.index_select(0, owner), rows(key, layout.response_tokens)), dim=2),
            torch.cat((prompt_values.index_select(0, owner), rows(value, layout.response_tokens)), dim=2),
            attn_mask=layout.response_mask(window),
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(responses.transpose(1, 2).flatten(2).flatten(0, 1))
    # [L, H * D] in the order of the sequence; shape[2:0:-1] is (L, H).
    tokens = torch.cat(parts).index_select(0, layout.source)
    return tokens.view(1, *query.shape[2:0:-1], query.shape[3])
