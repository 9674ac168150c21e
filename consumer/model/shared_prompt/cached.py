"""A group's prompt goes through once, and its responses behind it by transformers' own cache, whose graph is kept.

    prompts [g, P] ─ forward ─▶ states [g, P, h], cache of g rows ─ a row for each response ─▶ cache of r rows
                                                                                                    │
                                            responses [r, R] ─ forward ─▶ states [r, R, h] ◀────────┘

Any architecture whose forward goes on behind a cache can do it: attention of any kind, sliding windows, soft caps,
sinks, linear attention. Prompts of one length go through together, so that none is padded. Responses are padded on the
right: what stands behind a token has no part in it, neither by causal attention nor in a state, which goes from left to
right.

Left out: recomputed activations, which a cache can't have (transformers takes it away there), and parameters that ranks
share, for ranks make their passes at the same time and each has other prompts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from consumer.model.inputs import CachedGroups
from consumer.model.language_head import base_causal_lm, last_states
from onbeat.base.group_cache import group_cache


def cached_states(model: PreTrainedModel, groups: CachedGroups) -> tuple[Tensor, Tensor]:
    """Computes the last hidden states of prompts and responses, with gradient.

    Returns:
        [g, P, h] and [r, R, h].
    """
    device = model.device
    cache = group_cache(base_causal_lm(model).config)
    prompts = last_states(
        model,
        cache=cache,
        input_ids=groups.prompt_ids.to(device),
        position_ids=groups.prompt_positions.to(device),
    )
    if not groups.response_ids.numel():
        return prompts, prompts.new_empty(0, 0, prompts.shape[-1])
    # Row r of the cache becomes that of the prompt of response r; its gradient is the sum over the prompt's responses.
    rows: Any = groups.prompt_of_response.to(device)
    cache.reorder_cache(rows)
    responses = last_states(
        model,
        cache=cache,
        input_ids=groups.response_ids.to(device),
        position_ids=groups.response_positions.to(device),
    )
    return prompts, responses
