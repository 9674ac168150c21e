"""Counts from shapes what a rollout batch costs the trainer: tokens through the layers, floating-point operations.

    6 N a token (Kaplan et al., arXiv 2001.08361, section 2.1), and 12 layers * width for each pair of attending tokens

with N the parameters that multiply a token: all but the input embedding and the head, which meets sampled tokens only,
and of a mixture of experts those that the router chooses for it, k of E; observations go through the layers. A matrix
that is not trained saves its weight gradient: 4 instead of 6. The reference only goes forward: 2 and 4.
Pairs are the causal ones, T (T + 1) / 2, not the T^2 of the usual short-hand; recomputed activations don't count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.micro_batch import line_tokens
from contracts.rollouts import RolloutBatch

EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
"""Keys by which the families' configs say how many experts a token goes through."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model's matrices that decide the cost of a token. `model_shape` reads it once for a learner."""

    num_body_parameters: int
    """Parameters that multiply one token between embedding and head: of routed experts the chosen ones."""
    num_head_parameters: int
    """Parameters of the output matrix, also where it is the embedding."""
    trained_share: float
    """Trained parameters over both, counted alike: below 1.0 under adapters."""
    num_layers: int
    """Layers that attend to pairs of tokens: linear attention, state spaces and convolutions have no pairs."""
    attention_width: float
    """Heads times their width: the mean of that of queries and keys, and that of values, where these differ."""


SHAPELESS = ModelShape(num_body_parameters=0, num_head_parameters=0, trained_share=1.0, num_layers=0, attention_width=0)
"""Counts tokens alone."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """The cost of one batch in one step, or before it. `training_cost` counts it, and metrics add it up."""

    num_tokens: int = 0
    """Tokens through the policy's layers; a prompt counts as often as it goes through."""
    flops: float | None = 0.0
    """Floating-point operations; None where the model has a shape that isn't known here."""


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Reads the shape of a model, once for a job."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    outside = {id(parameter) for part in (embedding, head) if part is not None for parameter in part.parameters()}
    num_chosen = next((getattr(config, key) for key in EXPERTS_OF_A_TOKEN if hasattr(config, key)), None)
    num_body = num_trained = 0
    for name, parameter in model.named_parameters():
        if id(parameter) not in outside:
            num_items = _items_of_a_token(name, parameter, num_chosen)
            num_body += num_items
            if parameter.requires_grad:
                num_trained += num_items
    head_parameters: list[nn.Parameter] = []
    if isinstance(head, nn.Module):
        head_parameters = list(head.parameters())
    num_head = sum(parameter.numel() for parameter in head_parameters)
    num_trained += sum(parameter.numel() for parameter in head_parameters if parameter.requires_grad)
    return ModelShape(
        num_body_parameters=num_body,
        num_head_parameters=num_head,
        trained_share=num_trained / (num_body + num_head),
        num_layers=_num_attending_layers(config),
        attention_width=config.num_attention_heads * _head_width(config),
    )


def _num_attending_layers(config: PreTrainedConfig) -> int:
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if layer_types is None:
        return config.num_hidden_layers
    return sum("attention" in layer_type and "linear" not in layer_type for layer_type in layer_types)


def _head_width(config: PreTrainedConfig) -> float:
    """Returns the width of a head, for scores and for the sum of values alike."""
    if getattr(config, "kv_lora_rank", None):
        # Latent attention (DeepSeek-V2, arXiv 2405.04434): `head_dim` is the rotated part of a query alone.
        return (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _items_of_a_token(name: str, parameter: nn.Parameter, num_chosen: int | None) -> int:
    """Returns how many items of a parameter of the body multiply one token.

    transformers keeps the routed experts of a layer in one tensor, [E, ...], below a module `experts`; shared experts,
    which every token goes through, and the router stand beside it. num_chosen: experts of a token; where the config
    doesn't say it, all are counted.
    """
    if num_chosen is None or parameter.dim() < 2 or "experts" not in name.split("."):
        return parameter.numel()
    num_experts = parameter.shape[0]
    # [E, ...]: the part of one expert, times the experts that the router chooses.
    return parameter.numel() // num_experts * min(num_chosen, num_experts)


def training_cost(
    shape: ModelShape,
    batch: RolloutBatch,
    *,
    rows: NDArray[np.int64],
    shares_prompts: bool,
    with_reference: bool,
    is_trained: bool,
    with_critic: bool = False,
) -> TrainingCost:
    """Counts tokens and floating-point operations of some rows of a batch.

    The last token of a response counts, although it is never an input: its log-prob is computed.

    Args:
        shape: The policy's, by `model_shape`.
        batch: The rollout batch.
        rows: [R] of the batch that go through the model.
        shares_prompts: True where a group's prompt goes through once.
        with_reference: True where a reference of the same shape goes forward, too.
        is_trained: True where there is a backward pass.
        with_critic: True where a second model of the shape is trained, whose head of one row counts nothing.
    """
    size = batch.group_size
    num_tokens = num_sampled = 0
    pairs = 0.0
    seen: set[int] = set()
    for row in rows.tolist():
        # The first row of its group: with it the prompt goes through.
        is_new = row // size not in seen
        seen.add(row // size)
        for place, (prompt, response) in enumerate(line_tokens(batch, row)):
            if place or is_new or not shares_prompts:
                num_tokens += prompt
                # Token t of a sequence attends to t tokens, itself included: 1 + 2 + ... + T.
                pairs += prompt * (prompt + 1) / 2
            num_tokens += response
            # Each token of the response attends to the whole prompt, and to the response up to itself.
            pairs += response * prompt + response * (response + 1) / 2
        # The head meets sampled tokens only: neither prompts nor observations.
        num_sampled += batch.groups[row // size].rollouts[row % size].completion.num_sampled
    multiplied = shape.num_body_parameters * num_tokens + shape.num_head_parameters * num_sampled
    attention = shape.num_layers * shape.attention_width * pairs
    # A multiply-add is 2 operations: 2 forward, 2 for the gradient of the input, and 2 for that of a trained weight.
    # Attention has two products of no weight, queries by keys and scores by values: 4 forward, 8 backward.
    flops = forward = 2.0 * multiplied + 4.0 * attention
    if is_trained:
        flops = (4.0 + 2.0 * shape.trained_share) * multiplied + 12.0 * attention
    if with_critic and multiplied:
        # The critic has the policy's body and no head: its share of what is multiplied.
        flops *= 1.0 + shape.num_body_parameters * num_tokens / multiplied
    if with_reference:
        flops += forward
    return TrainingCost(num_tokens=num_tokens, flops=flops)
