"""One token a row goes through a Llama-shaped model: the same kernels as transformers' forward, and little else.

For a small model most of a step of transformers' forward is not arithmetic: module calls, masks and keyword arguments
for one token. Here the operations stand alone, in the same order on the same numbers, so logits are equal bit for bit
(tests/contract/test_decoding.py). Queries and keys are normalised and rotated together: fewer and larger operations.

Left out: prompts (transformers' forward takes them), and every other architecture (it takes those altogether).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Exact classes: a model that derives from one of them may compute something else."""


@dataclass(kw_only=True)
class RotaryTable:
    """Cosines and signed sines [R, T, 1, D] of the T tokens to come; R is N, or 1 where all prompts are equally long.

    Transformers computes heads · cos + rotate_half(heads) · sin, where rotate_half maps (a, b) to (-b, a). Here the
    first half of the sine carries the minus, and heads are only swapped: -b · sin and b · (-sin) are the same bits.
    """

    cos: Tensor
    signed_sin: Tensor

    def rotate(self, heads: Tensor, step: int) -> Tensor:
        """[N, H, D] queries or keys of token `step`."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return heads * self.cos[:, step] + swapped * self.signed_sin[:, step]

    def keep(self, rows: Tensor) -> None:
        if len(self.cos) > 1:
            self.cos, self.signed_sin = self.cos[rows], self.signed_sin[rows]


class LeanStep:
    """Decodes the rows of one batch from their prompts' keys and values on, which stand in `cache`."""

    def __init__(self, model: Any, cache: Cache, *, rotary: RotaryTable, mask: Tensor | None) -> None:
        """mask: [N, 1, 1, P + T] bool, which is False where a prompt is padded; None where none is."""
        self._decoder = model.model
        self._head: nn.Linear = model.lm_head
        self._cache = cache
        self._rotary = rotary
        self._mask = mask
        self._norm_weights = [_query_and_key_norm(layer.self_attn) for layer in self._decoder.layers]
        self._step = 0

    def __call__(self, tokens: Tensor) -> Tensor:
        """[N] tokens → [N, V] logits after them."""
        hidden = functional.embedding(tokens, self._decoder.embed_tokens.weight)
        for index, layer in enumerate(self._decoder.layers):
            normed = _rms_norm(hidden, layer.input_layernorm)
            hidden = hidden + self._attention(index, layer.self_attn, normed)
            normed = _rms_norm(hidden, layer.post_attention_layernorm)
            # Llama's gated MLP: down(act(gate(x)) · up(x)).
            mlp = layer.mlp
            gated = mlp.act_fn(_linear(normed, mlp.gate_proj)) * _linear(normed, mlp.up_proj)
            hidden = hidden + _linear(gated, mlp.down_proj)
        self._step += 1
        return _linear(_rms_norm(hidden, self._decoder.norm), self._head)

    def keep(self, rows: Tensor) -> None:
        """Lets only these rows go on; their keys and values are shrunk by the owner of the cache."""
        self._rotary.keep(rows)
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _attention(self, index: int, attention: Any, normed: Tensor) -> Tensor:
        """[N, hidden] → [N, hidden]; the layer's cache takes the token's key and value."""
        num_rows = len(normed)
        queries, keys = _linear(normed, attention.q_proj), _linear(normed, attention.k_proj)
        # [N, Hq + Hk, D]: query heads first. Both are normalised and rotated alike, so one operation does for both.
        heads = torch.cat((queries, keys), dim=-1).view(num_rows, -1, attention.head_dim)
        norm_weight = self._norm_weights[index]
        if norm_weight is not None:
            heads = norm_weight * _normalised(heads, attention.q_norm.variance_epsilon)
        heads = self._rotary.rotate(heads, self._step)
        num_query_heads = queries.shape[-1] // attention.head_dim
        values = _linear(normed, attention.v_proj).view(num_rows, -1, 1, attention.head_dim)
        # [N, Hk, 1, D]: one token; the cache answers [N, Hk, P + t + 1, D], this token's column last.
        all_keys, all_values = self._cache.update(heads[:, num_query_heads:, None], values, index)
        attended = functional.scaled_dot_product_attention(
            heads[:, :num_query_heads, None],
            all_keys,
            all_values,
            # No causal mask: the only query is the newest token, before which everything lies. Only padding is masked.
            attn_mask=None if self._mask is None else self._mask[..., : all_keys.shape[2]],
            scale=attention.scaling,
            enable_gqa=True,
        )
        return _linear(attended.reshape(num_rows, -1), attention.o_proj)


def lean_step(model: PreTrainedModel, cache: Cache, mask: Tensor, *, num_tokens: int) -> LeanStep | None:
    """The LeanStep of a model, or None where it is not of the shape that LeanStep computes.

    mask: [N, P], the mask of the prompts that `cache` holds; num_tokens: P + T.
    """
    if not _is_lean(model):
        return None
    num_rows, width = mask.shape
    lengths = mask.sum(dim=1, keepdim=True)
    padded = bool((lengths < width).any())
    steps = torch.arange(num_tokens - width, device=mask.device)
    # Token t after a prompt of L tokens has position L + t: [N, T], or [1, T] where every prompt has as many.
    positions = (lengths if padded else lengths[:1]) + steps
    decoder: Any = model.model
    cos, sin = decoder.rotary_emb(decoder.embed_tokens.weight[:1], positions)
    # [R, T, D] → [R, T, 1, D]: the same for every head.
    half = sin.shape[-1] // 2
    signed_sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    whole_mask = None
    if padded:
        whole_mask = torch.cat((mask.bool(), mask.new_ones(num_rows, len(steps), dtype=torch.bool)), dim=1)
        whole_mask = whole_mask[:, None, None]
    rotary = RotaryTable(cos=cos[:, :, None], signed_sin=signed_sin[:, :, None])
    return LeanStep(model, cache, rotary=rotary, mask=whole_mask)


def _is_lean(model: Any) -> bool:
    """Whether LeanStep computes it: an exact class, full attention by SDPA, fixed rotary frequencies, plain linears."""
    if type(model) not in FAMILIES:
        return False
    config = model.config
    rope_type: str = config.rope_parameters["rope_type"]
    return (
        config._attn_implementation == "sdpa"
        and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
        and "dynamic" not in rope_type
        and rope_type != "longrope"
        and all(
            type(module) is nn.Linear for name, module in model.named_modules() if name.endswith(("_proj", "_head"))
        )
    )


def _query_and_key_norm(attention: Any) -> Tensor | None:
    """[Hq + Hk, D] weights of Qwen3's norms of queries and keys, head by head; None in a model without."""
    if not hasattr(attention, "q_norm"):
        return None
    num_query_heads = attention.q_proj.out_features // attention.head_dim
    num_key_heads = attention.k_proj.out_features // attention.head_dim
    return torch.cat(
        (attention.q_norm.weight.expand(num_query_heads, -1), attention.k_norm.weight.expand(num_key_heads, -1))
    )


def _linear(inputs: Tensor, layer: nn.Linear) -> Tensor:
    return functional.linear(inputs, layer.weight, layer.bias)


def _rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    return norm.weight * _normalised(hidden, norm.variance_epsilon)


def _normalised(hidden: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x²) + epsilon), in float32 as transformers computes it, and back in the input's dtype."""
    wide = hidden.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return (wide * torch.rsqrt(variance + epsilon)).to(hidden.dtype)
