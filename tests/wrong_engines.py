"""Ways in which an engine computes something else than its weights say, played on the model of a loaded engine.

Each is a function of the model and of the tensors that the engine has loaded so far, and returns what takes the places
of tensors, by name; what is no tensor it changes on the model itself, where a next load leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
Fault = Callable[[Any, Tensors, Tensors], dict[str, Tensor]]
"""(model, tensors of the version before, tensors of version 0) → name → what takes the tensor's place."""

LAST_LAYER = "model.layers.1."
"""Where the models of these tests have two layers."""


def _parameters(model: nn.Module, *ends: str) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.named_parameters() if name.endswith(ends)}


def dropped_tensor(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """The loader knows no place for a tensor, and leaves that of the version before."""
    return {name: before[name] for name in _parameters(model, "layers.1.self_attn.o_proj.weight")}


def initial_tensor(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """A tensor never gets a value: it has that of version 0, as the file has it."""
    return {name: initial[name] for name in _parameters(model, "layers.0.self_attn.o_proj.weight")}


def version_before(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """The loader says that it has replaced the tensors, and has replaced none."""
    return dict(before)


def experts_swapped(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """A kernel lays experts in another order than the router counts them in."""
    swapped = {}
    for name, tensor in _parameters(model, "experts.gate_up_proj", "experts.down_proj").items():
        if "layers.1." in name:
            order = list(range(len(tensor)))
            order[0], order[1] = order[1], order[0]
            swapped[name] = tensor[order].clone()
    assert swapped
    return swapped


def tied_head_left_old(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """The engine has a copy of the embedding for its head, and replaces the embedding alone."""
    if model.lm_head.weight is model.model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(before["model.embed_tokens.weight"].clone(), requires_grad=False)
    return {}


def layer_scaled(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    return {
        name: tensor.detach() * 1.01
        for name, tensor in model.named_parameters()
        if name.startswith(LAST_LAYER) and tensor.dim() > 1
    }


def other_rotary_base(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """A loader reads rope_theta from another place of config.json than the model does."""
    rotary = model.model.rotary_emb
    rotary.inv_freq.pow_(0.75)
    return {}


def cast_twice(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Weights go through bfloat16 on their way."""
    return {name: tensor.detach().bfloat16().float() for name, tensor in model.named_parameters()}


def attention_off(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """What attention adds is 2 % too large."""
    return {name: tensor * 1.02 for name, tensor in _parameters(model, "self_attn.o_proj.weight").items()}


def softmax_scale(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Scores are divided by the root of another head size."""
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.head_dim**-0.5 * 0.9
    return {}


def window_ignored(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Attention sees tokens that a sliding window hides."""
    model.config.sliding_window = None
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    return {}


def norm_epsilon(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Norms have the epsilon of another family."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-5
    return {}


def embedding_shifted(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Rows of the embedding stand one place further, as under a padded vocabulary that begins elsewhere."""
    return {name: tensor.roll(1, 0) for name, tensor in _parameters(model, "embed_tokens.weight").items()}


def cached_keys_left_old(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Keys and values that were cached under the version before are looked up under this one."""
    return {name: before[name] for name in _parameters(model, "k_proj.weight", "v_proj.weight")}


def heads_in_another_order(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """Queries of grouped attention meet the keys of another group."""
    heads = {}
    for name, tensor in _parameters(model, "q_proj.weight").items():
        rows = tensor.view(4, -1, tensor.shape[-1])
        heads[name] = rows[[0, 2, 1, 3]].reshape(tensor.shape)
    return heads


def layer_left_out(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """What the last layer adds is lost."""
    return {
        name: torch.zeros_like(tensor)
        for name, tensor in _parameters(model, "self_attn.o_proj.weight", "mlp.down_proj.weight").items()
        if name.startswith(LAST_LAYER)
    }


def fewer_experts(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """The router takes one expert where the model takes two."""
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = 1
    return {}


def biases_dropped(model: Any, before: Tensors, initial: Tensors) -> dict[str, Tensor]:
    """A loader that looks for weights alone leaves biases at zero."""
    biases = {name: torch.zeros_like(tensor) for name, tensor in _parameters(model, ".bias").items()}
    assert biases
    return biases
