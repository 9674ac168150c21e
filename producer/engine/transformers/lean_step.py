"""A decoding step of a Llama-shaped model, one token a row: transformers' kernels in transformers' order, no more.

For a small model most of a step of transformers' forward is not arithmetic: module calls, masks and keyword arguments
for one token. Here the operations stand alone, in the same order on the same numbers, so logits are equal bit for bit
(tests/contract/test_row_steps.py). Queries and keys are normalised and rotated together: fewer and larger operations.

Left out: prompts (transformers' forward takes them), and every other architecture (it takes those altogether).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from onbeat.base.kernels import PLAIN_LINEAR
from onbeat.weights.model_folder import Float32Head
from producer.engine.transformers.packed_products import MOST_ROWS, Packing, Product
from producer.engine.transformers.row_cache import RowCache, layer_windows

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
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
        """Returns the rows of [N] positions as [N, 1, D]: the same for every head."""
        return RotaryTable(cos=self.cos[positions, None], signed_sin=self.signed_sin[positions, None])

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotates [N, H, D] queries or keys."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        # [N, H, D] by [N, 1, D]: the rotation of a position is the same for every head.
        return heads * self.cos + swapped * self.signed_sin


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The RMS norm x / sqrt(mean(x²) + epsilon), weighted: in float32 as transformers computes it, then in the input's
    dtype.
    """

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(weight=module.weight, epsilon=module.variance_epsilon)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normalises the last axis of […, D]."""
        if hidden.is_cuda:
            # The same numbers by one kernel, also inside of a lower precision.
            return self.weight * functional.rms_norm(hidden, hidden.shape[-1:], eps=self.epsilon)
        if hidden.dtype == torch.float32:
            return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.epsilon))
        wide = hidden.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(hidden.dtype)


class LeanStep:
    """A RowStep of the models in FAMILIES: rows of any batches, each at its own position."""

    most_fed = MOST_ROWS

    def __init__(self, model: Any, packing: Packing, *, num_layers: int | None = None) -> None:
        """Looks up the model's layers.

        Args:
            model: The model.
            packing: The way of its products.
            num_layers: The number of first layers that are used, all by default; the self-test uses few.
        """
        self.windows = layer_windows(model.config) or ()
        self._decoder = model.model
        self.is_on_gpu: bool = model.device.type == "cuda"
        self._head = Product((model.lm_head,), packing)
        self._layers = [LeanLayer(layer, packing) for layer in self._decoder.layers[:num_layers]]
        self._norm = Norm.of(self._decoder.norm)
        self._rotary = RotaryTable(cos=torch.empty(0), signed_sin=torch.empty(0))

    def refresh(self) -> None:
        """Takes what is made of the weights from those that the model has now."""
        self.release()
        self._norm = Norm.of(self._decoder.norm)
        for layer in self._layers:
            layer.refresh()

    def release(self) -> None:
        self._head.release()
        for layer in self._layers:
            layer.release()

    def __call__(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Computes a step: [N] tokens at [N] positions → [N, V] logits after them; the cache has begun the step."""
        hidden, rotary = self._before_last(tokens, positions, cache)
        hidden = self._layers[-1](hidden, len(self._layers) - 1, rotary=rotary, cache=cache)
        return self._head(self._norm(hidden).to(self._head.dtype))

    def feed(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> None:
        """Leaves the keys and values of [T, N] tokens: products take them all at once, attention T times N of them."""
        hidden, rotary = self._before_last(tokens.flatten(), positions.flatten(), cache)
        self._layers[-1].extend(hidden, len(self._layers) - 1, rotary=rotary, cache=cache)

    def _before_last(self, tokens: Tensor, positions: Tensor, cache: RowCache) -> tuple[Tensor, RotaryTable]:
        """Computes all layers but the last; returns that layer's input, and the rotary table of the positions."""
        rotary = self._table(cache.num_columns).at(positions)
        hidden = functional.embedding(tokens, self._decoder.embed_tokens.weight)
        for index, layer in enumerate(self._layers[:-1]):
            hidden = layer(hidden, index, rotary=rotary, cache=cache)
        return hidden, rotary

    def _table(self, num_positions: int) -> RotaryTable:
        """Frequencies are the config's, so the table outlives every version of the weights."""
        if self._rotary.cos.shape[0] < num_positions:
            weight = self._decoder.embed_tokens.weight
            cos, sin = self._decoder.rotary_emb(weight[:1], torch.arange(num_positions, device=weight.device)[None])
            half = sin.shape[-1] // 2
            # The minus of rotate_half stands here, at the first half: `rotate` only swaps.
            signed_sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
            self._rotary = RotaryTable(cos=cos[0], signed_sin=signed_sin)
        return self._rotary


class LeanLayer:
    """A decoder layer, whose modules are looked up once: a lookup takes as long as a small operation."""

    def __init__(self, layer: Any, packing: Packing) -> None:
        attention = layer.self_attn
        mlp = layer.mlp
        self._attention = attention
        self._layer = layer
        # Queries, keys and values are projections of the same rows: one product.
        self._heads = Product((attention.q_proj, attention.k_proj, attention.v_proj), packing)
        self._out = Product((attention.o_proj,), packing)
        # Gate and up stay apart: the activation goes over one tensor without gaps, as in transformers' forward.
        self._gate, self._up, self._down = (
            Product((projection,), packing) for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self._activation = mlp.act_fn
        self._head_dim: int = attention.head_dim
        self._scaling: float = attention.scaling
        self._num_query_heads = attention.q_proj.out_features // self._head_dim
        self._num_rotated_heads = self._num_query_heads + attention.k_proj.out_features // self._head_dim
        self._head_norm: Norm | None = None
        self.refresh()

    def refresh(self) -> None:
        self._norms = Norm.of(self._layer.input_layernorm), Norm.of(self._layer.post_attention_layernorm)
        head_norm = _query_and_key_norm(self._attention)
        if self._head_norm is None or head_norm is None:
            self._head_norm = head_norm
        else:
            # Into the memory that a recorded step reads (cuda_graphs.py).
            self._head_norm.weight.copy_(head_norm.weight)

    def release(self) -> None:
        for product in (self._heads, self._out, self._gate, self._up, self._down):
            product.release()

    def __call__(self, hidden: Tensor, index: int, *, rotary: RotaryTable, cache: RowCache) -> Tensor:
        queries, keys, values = self.extend(hidden, index, rotary=rotary, cache=cache)
        hidden = hidden + self._attended(queries, keys, values, cache.masks_of(index))
        _, before_mlp = self._norms
        normed = before_mlp(hidden)
        # Llama's gated MLP: down(act(gate(x)) · up(x)).
        return hidden + self._down(self._activation(self._gate(normed)) * self._up(normed))

    def extend(
        self, hidden: Tensor, index: int, *, rotary: RotaryTable, cache: RowCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the tokens' keys and values into the layer's cache.

        Returns:
            [N, Hq, 1, D] queries, and all keys and values of the rows [row, head, column, D].
        """
        before_attention, _ = self._norms
        num_query_heads = self._num_query_heads
        num_rotated = self._num_rotated_heads
        projected = self._heads(before_attention(hidden)).view(hidden.shape[0], -1, self._head_dim)
        # Heads stand in the order of the product's layers: Hq of queries, Hk of keys, Hk of values. Those of queries
        # and keys, [N, Hq + Hk, D], are normalised and rotated alike, so one operation does for both.
        heads = projected[:, :num_rotated]
        values = projected[:, num_rotated:]
        if self._head_norm is not None:
            heads = self._head_norm(heads)
        heads = rotary.rotate(heads)
        queries = heads[:, :num_query_heads, None]
        if hidden.is_cuda:
            # The queries of a key's head as rows of one product: a GPU would copy keys and values for each query.
            queries = heads[:, :num_query_heads].unflatten(1, (num_rotated - num_query_heads, -1))
        return queries, *cache.extend(index, heads[:, num_query_heads:], values)

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """Attends: [N, Hq, 1, D] queries → [N, hidden].

        Each mask is of one token a row: a token's bits depend on the number of tokens that attend with it, so each
        attends alone.
        """
        # Masks are added to the scores: 0.0 where a column is attended to, -inf where it isn't. Chunk t of the queries
        # is token t of each row, as `RowCache.begin_step` orders them.
        attended = [
            functional.scaled_dot_product_attention(
                of_token, keys, values, attn_mask=mask, scale=self._scaling, enable_gqa=not queries.is_cuda
            )
            for of_token, mask in zip(queries.chunk(len(masks)), masks, strict=True)
        ]
        together = attended[0] if len(attended) == 1 else torch.cat(attended)
        return self._out(together.reshape(queries.shape[0], -1))


def is_lean(model: Any) -> bool:
    """Returns True where LeanStep computes the model: an exact class, SDPA, fixed rotary frequencies, plain linears."""
    if type(model) not in FAMILIES:
        return False
    config = model.config
    rope_type: str = config.rope_parameters["rope_type"]
    return (
        config._attn_implementation == "sdpa"
        and {*(getattr(config, "layer_types", None) or ())} <= {"full_attention", "sliding_attention"}
        and "dynamic" not in rope_type
        and rope_type != "longrope"
        and all(
            type(module) in (*PLAIN_LINEAR, Float32Head)
            for name, module in model.named_modules()
            if name.endswith(("_proj", "_head"))
        )
    )


def _query_and_key_norm(attention: Any) -> Norm | None:
    """Joins Qwen3's norms of queries and keys, with weights [Hq + Hk, D] head by head; None for a model without any."""
    if not hasattr(attention, "q_norm"):
        return None
    num_query_heads = attention.q_proj.out_features // attention.head_dim
    num_key_heads = attention.k_proj.out_features // attention.head_dim
    weight = torch.cat(
        (attention.q_norm.weight.expand(num_query_heads, -1), attention.k_norm.weight.expand(num_key_heads, -1))
    )
    return Norm(weight=weight, epsilon=attention.q_norm.variance_epsilon)
