"""One token a row goes through a Llama-shaped model: the same kernels as transformers' forward, and little else.

For a small model most of a step of transformers' forward is not arithmetic: module calls, masks and keyword arguments
for one token. Here the operations stand alone, in the same order on the same numbers, so logits are equal bit for bit
(tests/contract/test_row_steps.py). Queries and keys are normalised and rotated together: fewer and larger operations.

Left out: prompts (transformers' forward takes them), and every other architecture (it takes those altogether).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from producer.engine.transformers.row_cache import RowCache

FAMILIES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
"""Exact classes: a model that derives from one of them may compute something else."""


@dataclass(kw_only=True)
class RotaryTable:
    """Cosines and signed sines [T, D] of the first T positions.

    Transformers computes heads · cos + rotate_half(heads) · sin, where rotate_half maps (a, b) to (-b, a). Here the
    first half of the sine carries the minus, and heads are only swapped: -b · sin and b · (-sin) are the same bits.
    """

    cos: Tensor
    signed_sin: Tensor

    def at(self, positions: Tensor) -> RotaryTable:
        """[N] positions → [N, 1, D]: the same for every head."""
        return RotaryTable(cos=self.cos[positions, None], signed_sin=self.signed_sin[positions, None])

    def rotate(self, heads: Tensor) -> Tensor:
        """[N, H, D] queries or keys."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return heads * self.cos + swapped * self.signed_sin


class LeanStep:
    """A RowStep of a model that it knows: rows of any batches, each at its own position."""

    def __init__(self, model: Any, *, num_layers: int | None = None) -> None:
        """num_layers: so many of the model's first layers, all of them by default; the canary asks for few."""
        self._decoder = model.model
        self._head: nn.Linear = model.lm_head
        self._layers = [LeanLayer(layer) for layer in self._decoder.layers[:num_layers]]
        self._rotary = RotaryTable(cos=torch.empty(0), signed_sin=torch.empty(0))

    def refresh(self) -> None:
        """Takes what is made of the weights from those that the model has now."""
        for layer in self._layers:
            layer.refresh()

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """[N] tokens at [N] positions → [N, V] logits after them; the cache has begun the step."""
        rotary = self._table(cache.num_columns).at(positions)
        hidden = functional.embedding(tokens, self._decoder.embed_tokens.weight)
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, index, rotary=rotary, cache=cache)
        return _linear(_rms_norm(hidden, self._decoder.norm), self._head)

    def _table(self, num_positions: int) -> RotaryTable:
        """Frequencies are the config's, so the table outlives every version of the weights."""
        if len(self._rotary.cos) < num_positions:
            weight = self._decoder.embed_tokens.weight
            cos, sin = self._decoder.rotary_emb(weight[:1], torch.arange(num_positions, device=weight.device)[None])
            half = sin.shape[-1] // 2
            signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._rotary = RotaryTable(cos=cos[0], signed_sin=signed_sin)
        return self._rotary


class LeanLayer:
    """One decoder layer, whose modules are looked up once: a lookup takes as long as a small operation."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._attention = attention
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        self._mlp = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._num_query_heads = attention.q_proj.out_features // self._head_dim
        self._norm_weight: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        self._norm_weight = _query_and_key_norm(self._attention)

    def __call__(self, hidden: Tensor, index: int, *, rotary: RotaryTable, cache: RowCache) -> Tensor:
        before_attention, before_mlp = self._norms
        gate, up, down, act = self._mlp
        hidden = hidden + self._attended(_rms_norm(hidden, before_attention), index, rotary=rotary, cache=cache)
        normed = _rms_norm(hidden, before_mlp)
        # Llama's gated MLP: down(act(gate(x)) · up(x)).
        return hidden + _linear(act(_linear(normed, gate)) * _linear(normed, up), down)

    def _attended(self, normed: Tensor, index: int, *, rotary: RotaryTable, cache: RowCache) -> Tensor:
        """[N, hidden] → [N, hidden]; the layer's cache takes the token's key and value."""
        num_rows, num_query_heads, head_dim = len(normed), self._num_query_heads, self._head_dim
        q_proj, k_proj, v_proj, o_proj = self._projections
        # [N, Hq + Hk, D]: query heads first. Both are normalised and rotated alike, so one operation does for both.
        heads = torch.cat((_linear(normed, q_proj), _linear(normed, k_proj)), dim=-1).view(num_rows, -1, head_dim)
        if self._norm_weight is not None:
            heads = self._norm_weight * _normalised(heads, self._attention.q_norm.variance_epsilon)
        heads = rotary.rotate(heads)
        values = _linear(normed, v_proj).view(num_rows, -1, head_dim)
        all_keys, all_values = cache.extend(index, heads[:, num_query_heads:], values)
        attended = functional.scaled_dot_product_attention(
            heads[:, :num_query_heads, None],
            all_keys,
            all_values,
            attn_mask=cache.step_mask,
            scale=self._scaling,
            enable_gqa=True,
        )
        return _linear(attended.reshape(num_rows, -1), o_proj)


def is_lean(model: Any) -> bool:
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
