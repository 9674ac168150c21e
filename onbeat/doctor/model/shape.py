"""The shapes of a folder's model, by a model without memory: no weight is read, whatever the folder's size.

config.json ─▶ model on the meta device ─▶ parameters, layers, adapters' layers, names at the doors
index, or heads of the safetensors      ─▶ tensors of the model that no file has
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from consumer.gradient.cost import EXPERTS_OF_A_TOKEN
from consumer.model.adapters import chosen_layers
from consumer.ranks.fsdp.sharded_loading import sharded_layers
from contracts.errors import InvalidInput
from contracts.spec.trainer import LoraSpec
from onbeat.doctor.model.memory import ModelSizes, ParameterSize
from onbeat.weights.base_model.checkpoint_names import stored_names
from onbeat.weights.base_model.text_model import TextModel, text_model
from onbeat.weights.layout import Layout, layout_of
from onbeat.weights.model_folder import empty_model, model_config, weight_tensors


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A folder's model without memory. `shape_of` creates it."""

    folder: Path
    chosen: TextModel
    model: PreTrainedModel
    """On the meta device."""
    layout: Layout
    """The layout of a version."""

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in cast(nn.Module, self.model).parameters())


def shape_of(folder: Path, dtype: torch.dtype) -> Shape:
    """Makes a folder's model without memory. Raises InvalidInput where transformers makes no causal LM of its config.

    Args:
        folder: The model's folder.
        dtype: The dtype of the parameters.
    """
    model = empty_model(folder, dtype=dtype, device="meta")
    return Shape(
        folder=folder,
        chosen=text_model(model_config(folder)),
        model=model,
        layout=layout_of(dict(weight_tensors(cast(nn.Module, model)))),
    )


def missing_tensors(shape: Shape) -> list[str]:
    """Returns the parameters of the model that no tensor of the folder becomes, which a trainer refuses as it loads."""
    model = shape.model
    conversions = shape.chosen.conversions(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    network = cast(nn.Module, model)
    targets = network.state_dict()
    loaded: set[str] = set()
    # Some renamings hold together, and rely on this order of the names.
    for name in sorted(stored_names(shape.folder), key=dot_natural_key):
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, targets)
        if renamed not in targets:
            # As transformers does: a name that a rule leads astray, and that is the model's own, stays.
            renamed = rename_source_key(name, [], [], model.base_model_prefix, targets)[0]
        loaded.add(renamed)
    # A tied parameter has several names, of which a folder has one.
    reached = {id(parameter) for name, parameter in network.named_parameters(remove_duplicate=False) if name in loaded}
    return [name for name, parameter in network.named_parameters() if id(parameter) not in reached]


def sizes_of(shape: Shape, *, out_of_reach: Collection[str], lora: LoraSpec | None) -> ModelSizes:
    """Returns the sizes by which memory is counted.

    Args:
        shape: The model without memory.
        out_of_reach: The names of the parameters that no gradient reaches.
        lora: The adapters; None: the model is trained.

    Raises:
        InvalidInput: A layer that the adapters name isn't there, or takes none.
    """
    model = shape.model
    network = cast(nn.Module, model)
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    head: Any = model.get_output_embeddings()
    head_id = id(head.weight) if head is not None else None
    layer_names = _layer_names(model)
    parameters: list[ParameterSize] = []
    for name, parameter in network.named_parameters():
        is_embedding = id(parameter) in embeddings
        is_head = id(parameter) == head_id
        parameters.append(
            ParameterSize(
                name=name,
                shape=tuple(parameter.shape),
                is_reached=name not in out_of_reach,
                is_hidden=parameter.dim() == 2 and not is_embedding and not is_head,
                is_head=is_head and not is_embedding,
                layer=_layer_of(name, layer_names),
            )
        )
    parameter_names = {parameter.name for parameter in parameters}
    buffer_bytes = sum(tensor.num_bytes for name, tensor in shape.layout.items() if name not in parameter_names)
    adapted: dict[str, Any] = {}
    if lora is not None:
        adapted = dict(chosen_layers(model, lora, out_of_reach))
    config = model.config.get_text_config()
    return ModelSizes(
        parameters=tuple(parameters),
        buffer_bytes=buffer_bytes,
        adapters=tuple((layer.in_features, layer.out_features) for layer in adapted.values()),
        adapted_items=sum(layer.weight.numel() for layer in adapted.values()),
        token_items=_token_items(model, head),
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocabulary_size=head.weight.shape[0] if head is not None else config.vocab_size,
    )


def _layer_names(model: PreTrainedModel) -> tuple[str, ...]:
    try:
        return tuple(sharded_layers(model))
    except InvalidInput:
        # Without layers of their own all parameters are one part; such a model isn't shared by ranks.
        return ()


def _layer_of(name: str, layer_names: Collection[str]) -> str:
    return next((layer for layer in layer_names if name.startswith(f"{layer}.")), "")


def _token_items(model: PreTrainedModel, head: Any) -> int:
    """Counts the inputs and outputs of the matrices that a token of the body meets, of experts those of the chosen."""
    config = model.config.get_text_config()
    num_chosen = next((getattr(config, key) for key in EXPERTS_OF_A_TOKEN if hasattr(config, key)), None)
    items = 0
    for module in cast(nn.Module, model).modules():
        if isinstance(module, nn.Linear) and module is not head:
            items += module.in_features + module.out_features
    for parameter in cast(nn.Module, model).parameters():
        if parameter.dim() == 3:
            num_experts, num_rows, num_columns = parameter.shape
            # A convolution of a state's channels has three axes, too, one of which is 1 or a few: it counts little.
            items += min(num_chosen or 1, num_experts) * (num_rows + num_columns)
    return items
