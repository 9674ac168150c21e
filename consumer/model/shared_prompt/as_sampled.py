"""Attention over a packed sequence in the order in which a generator's steps compute it: the very bits of its rows.

The transformers engine takes a batch's prompts through the model together, padded on the left, and then one token of
each row at a time over columns that begin at the row's first token. A product's row, a norm and a rotation have the
same bits in any company; attention does not, for a blocked kernel adds up in another order. So it goes a token at a
time here too, over all rows at once: on a CPU that takes no longer. The backward pass is the blocked one's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from consumer.model.shared_prompt.layout import SharedPromptLayout

Blocked = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(query, key, value) → the same attention, differentiable, to float32."""


def attention_as_sampled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SharedPromptLayout,
    *,
    scaling: float | None,
    window: int | None,
    blocked: Blocked,
) -> Tensor:
    """Computes attention with the bits of a generator's steps.

    Args:
        query: [1, H, L, D].
        key: [1, H_kv, L, D].
        value: [1, H_kv, L, D].
        layout: The sequence's, with its prompts' `prefill`.
        scaling: The factor of the scores; None for 1 / sqrt(D).
        window: Tokens that the layer looks back, by position, itself included; None for all.
        blocked: The same attention by a blocked kernel, whose backward pass is taken.

    Returns:
        [1, L, H, D].
    """
    attended: Tensor = _AsSampled.apply(query, key, value, layout, scaling, window, blocked)
    return attended


class _AsSampled(torch.autograd.Function):
    """Returns the values of a generator's steps, with the gradient of the blocked kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: SharedPromptLayout,
        scaling: float | None,
        window: int | None,
        blocked: Blocked,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.blocked = blocked
        # [L, H, D] by token.
        queries, keys, values = (heads[0].transpose(0, 1) for heads in (query, key, value))
        # Grouped queries where there are fewer heads of keys than of queries.
        options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        parts = [part(queries, keys, values, layout, window, options) for part in (_prompts, _responses)]
        return torch.cat(parts).index_select(0, layout.sampled_source)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        with torch.enable_grad():
            attended = ctx.blocked(*inputs)
        return *torch.autograd.grad(attended, inputs, gradients[0]), None, None, None, None


def _prompts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SharedPromptLayout,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Returns [g * W, H, D], as `left_padded_prompts` has them."""
    prefill = layout.prefill
    index = layout.left_padded_prompts
    if prefill is None:
        raise AssertionError("the layout is not of a rollout batch")
    rows = [heads[index].transpose(1, 2) for heads in (query, key, value)]
    mask = None
    # A prefill that is as wide as a window has a mask, although such a window hides no token yet: transformers' rule.
    has_window = window is not None and prefill.width >= window
    if prefill.is_padded or has_window:
        columns = torch.arange(prefill.width, device=layout.device)
        # [g] the first real column of each prompt.
        first = prefill.width - layout.prompt_lengths
        # bool [g, 1, W, W]: causal, without the padding on the left.
        mask = ((columns[None, :] <= columns[:, None]) & (columns >= first[:, None, None]))[:, None]
        if window is not None and has_window:
            # Padding stands on the left, so a distance in columns is one in positions.
            mask &= columns[:, None] - columns[None, :] < window
    attended = scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=mask is None, **options)
    return attended.transpose(1, 2).flatten(0, 1)


def _responses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SharedPromptLayout,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Returns [r * R, H, D], as `response_tokens` has them."""
    if not layout.response_tokens.numel():
        return query[:0]
    queries = query[layout.response_tokens]
    keys, values = (heads[layout.row_columns].transpose(1, 2) for heads in (key, value))
    # [r] the columns of the prompt before each response.
    lengths = layout.prompt_lengths[layout.prompt_of_response]
    columns = torch.arange(layout.row_columns.shape[1], device=layout.device)
    attended = torch.empty_like(queries)
    # One query of each response at a time: the shapes of a generator's step, and so its kernel and its order of sums.
    for number in range(queries.shape[1]):
        # Token `number` of a response stands in the column behind its prompt and the tokens before it.
        own = (lengths + number)[:, None]
        seen = columns <= own
        if window is not None:
            # A row's columns are its positions: a window of W at position p begins at column p - W + 1.
            seen &= columns > own - window
        # A float mask, 0.0 or -inf, as the generator's step has: a boolean one takes another kernel.
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, float("-inf"))[:, None, None]
        step = scaled_dot_product_attention(queries[:, number, :, None], keys, values, attn_mask=mask, **options)
        attended[:, number] = step[:, :, 0]
    return attended.flatten(0, 1)
