"""LoRA adapters in a policy's linear layers, by peft: only they are trained.

    pass        y = W x + scaling · B (A x)          peft's layer; where W' is rounded, y = W' x (merged_layers.py)
    published   W' = W + scaling · B A               `lora_merge`: what a generator holds
    reference   y = W x                              `disabled`: the model as the job found it, without a copy

There is no dropout: a pass is a function of weights and tokens alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from consumer.model.merged_layers import MergedLayers, matrices
from contracts.errors import InvalidInput
from contracts.spec_tables.trainer import ALL_LINEAR, LoraSpec
from onbeat.kernels import PLAIN_LINEAR
from onbeat.weights.adapter.matrices import matrix_names, merge_into

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

ADAPTER = "default"
"""peft's name of the only one."""
FIELD = "trainer.lora"


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of one model."""

    layers: Mapping[str, LoraLinear]
    """Layers by their name in the model as it was, where a layer's weight is `{name}.weight`."""
    scaling: float
    """alpha / rank."""
    merged_layers: MergedLayers | None = None
    """Not None where the model's dtype is below float32, A's and B's: passes go through the published weights."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """A [rank, inputs] and B [outputs, rank] of each layer, float32, under the names that peft saves them by."""
        named: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            named |= zip(matrix_names(name), matrices(layer, ADAPTER), strict=True)
        return named

    def merged(self, layer: str, weight: Tensor) -> Tensor:
        """Returns a new tensor: a layer's weight in the model as it was, with its adapter in it."""
        merged = torch.empty_like(weight)
        lora_a, lora_b = matrices(self.layers[layer], ADAPTER)
        merge_into(merged, weight, lora_a=lora_a.detach(), lora_b=lora_b.detach(), scaling=self.scaling)
        return merged

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside, the model is the one without adapters, bit for bit."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            with contextlib.nullcontext() if self.merged_layers is None else self.merged_layers.swapped():
                yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)


def attach_adapters(model: PreTrainedModel, spec: LoraSpec, *, seed: int) -> Adapters:
    """Puts an adapter into each layer that the spec names; B is zero, so that the model computes what it did.

    A is drawn from `seed` alone. Every other parameter is frozen. Raises InvalidInput naming the key where a name fits
    no layer, or one that is not a plain linear layer, or a head that is tied to the embedding.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear as LoraLinear
    except ImportError as error:
        raise InvalidInput("peft is not installed", field=FIELD, cure='pip install "onbeat[lora]"') from error
    _check_targets(model, spec)
    everything = spec.target_modules == (ALL_LINEAR,)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),
        target_modules=ALL_LINEAR if everything else list(spec.target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, cast(nn.Module, model), ADAPTER)
    layers: dict[str, Any] = {
        name: module for name, module in cast(nn.Module, model).named_modules() if isinstance(module, LoraLinear)
    }
    for layer in layers.values():
        # peft makes A and B in the model's dtype; a step is smaller than what bfloat16 can tell apart.
        layer.lora_A[ADAPTER].float()
        layer.lora_B[ADAPTER].float()
    scaling = spec.alpha / spec.rank
    merged_layers = None
    if model.dtype not in (torch.float32, torch.float64):
        merged_layers = MergedLayers(cast(nn.Module, model), layers, adapter=ADAPTER, scaling=scaling)
    return Adapters(layers=layers, scaling=scaling, merged_layers=merged_layers)


def base_name(name: str) -> str:
    """The name that a parameter of a model with adapters has in the model as it was."""
    return name.replace(".base_layer.", ".")


def is_adapter_name(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _check_targets(model: PreTrainedModel, spec: LoraSpec) -> None:
    modules = dict(cast(nn.Module, model).named_modules())
    field = f"{FIELD}.target_modules"
    if spec.target_modules == (ALL_LINEAR,):
        head = model.get_output_embeddings()
        # Conv1D is GPT-2's transposed linear layer.
        linear = {name: one for name, one in modules.items() if isinstance(one, (nn.Linear, Conv1D))}
        chosen = {name: one for name, one in linear.items() if one is not head}
    else:
        chosen = {}
        for target in spec.target_modules:
            found = {name: module for name, module in modules.items() if f".{name}".endswith(f".{target}")}
            if not found:
                raise InvalidInput(f"`{target}` is no layer of the model", field=field, cure=_layer_words(modules))
            chosen |= found
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    for name, module in chosen.items():
        if type(module) not in PLAIN_LINEAR:
            problem = f"{name} is a {type(module).__name__}, adapters go into nn.Linear"
            raise InvalidInput(problem, field=field, cure=_layer_words(modules))
        if module.weight is embedding.weight:
            raise InvalidInput(
                f"{name} is tied to the embedding, which an adapter of the head would change",
                field=field,
                cure="leave it out, or use a model whose head has a weight of its own",
            )


def _layer_words(modules: Mapping[str, nn.Module]) -> str:
    names = sorted({name.rpartition(".")[2] for name, module in modules.items() if type(module) in PLAIN_LINEAR})
    return f"linear layers of this model end in {', '.join(names)}" if names else "this model takes no adapters"
