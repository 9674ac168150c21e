"""LoRA adapters in a policy's linear layers, by peft: only they are trained.

    pass        y = W x + scaling · B (A x)          peft's layer; where W' is rounded, y = W' x (merged_layers.py)
    published   W' = W + scaling · B A               `lora_merge`: what a generator holds
    reference   y = W x                              `disabled`: the model as the job found it, without a copy

There is no dropout: a pass is a function of weights and tokens alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from consumer.model.merged_layers import MergedLayers, matrices
from contracts.errors import InvalidInput, first_line
from contracts.spec.trainer import ALL_LINEAR, LoraSpec
from onbeat.base.kernels import PLAIN_LINEAR
from onbeat.weights.adapter.matrices import matrix_names, merge_into

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

ADAPTER = "default"
"""peft's name of the only one."""
FIELD = "trainer.lora"
TARGETS = f"{FIELD}.target_modules"
HELD = "model"
"""The model's name in the module that peft is given."""
LAYER_NUMBER = re.compile(r"\.\d+\.")
MOST_NAMED = 4
"""Kinds of matrices that one line names."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of one model.

    `attach_adapters` creates them, optimizer steps change A and B, and passes and publishing read them.
    """

    layers: Mapping[str, LoraLinear]
    """Layers by their name in the model as it was, where a layer's weight is `{name}.weight`."""
    scaling: float
    """alpha / rank."""
    merged_layers: MergedLayers | None = None
    """Not None where the model's dtype is below float32, A's and B's: passes go through the published weights."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns A [rank, inputs] and B [outputs, rank] of each layer, float32, by the names in peft's files."""
        named: dict[str, nn.Parameter] = {}
        for name, layer in self.layers.items():
            named |= zip(matrix_names(name), matrices(layer, ADAPTER), strict=True)
        return named

    def merged(self, layer: str, weight: Tensor) -> Tensor:
        """Returns a new tensor: a layer's weight in the model as it was, with its adapter merged into it."""
        merged = torch.empty_like(weight)
        lora_a, lora_b = matrices(self.layers[layer], ADAPTER)
        merge_into(merged, weight, lora_a=lora_a.detach(), lora_b=lora_b.detach(), scaling=self.scaling)
        return merged

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Turns the adapters off inside: the model computes as it did without them, bit for bit."""
        for layer in self.layers.values():
            layer.enable_adapters(False)
        try:
            with contextlib.nullcontext() if self.merged_layers is None else self.merged_layers.swapped():
                yield
        finally:
            for layer in self.layers.values():
                layer.enable_adapters(True)


def attach_adapters(
    model: PreTrainedModel, spec: LoraSpec, *, seed: int, out_of_reach: Collection[str] = ()
) -> Adapters:
    """Puts an adapter into each layer that the spec names; B is zero, so that the model computes what it did.

    Every other parameter is frozen.

    Args:
        model: The model; it is changed in place.
        spec: The job's.
        seed: A is drawn from it alone.
        out_of_reach: The names of the parameters that no gradient can reach: their layers get no adapter.

    Raises:
        InvalidInput: Where a name fits no layer, or a layer that is not a plain linear one, or a head that is tied to
            the embedding, or where peft refuses; it names the spec's key.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear as LoraLinear
    except ImportError as error:
        raise InvalidInput("peft is not installed", field=FIELD, cure='pip install "onbeat[lora]"') from error
    chosen = chosen_layers(model, spec, out_of_reach)
    if spec.target_modules == (ALL_LINEAR,):
        frozen = left_frozen(model, chosen)
        if frozen:
            log.warning("%s = all-linear: %s", TARGETS, frozen)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=cast(int, spec.alpha),
        # Whole names, each of one layer: by its own rules peft also takes routers, and the experts' parameters of three
        # axes, whose adapters no version of ours can hold.
        target_modules=[f"{HELD}.{name}" for name in chosen],
        lora_dropout=0.0,
        bias="none",
    )
    # Given the model itself, peft translates the names of a mixture of experts to other ones than were asked for.
    holder = nn.Module()
    holder.add_module(HELD, cast(nn.Module, model))
    # A is drawn from the job's seed, and the process' own random state is as it was afterwards.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, holder, ADAPTER)
        except ValueError as error:
            problem = f"peft puts no adapters into this model: {first_line(error)}"
            raise InvalidInput(problem, field=TARGETS, cure=_layer_words(chosen)) from error
    layers: dict[str, Any] = {
        name: module for name, module in cast(nn.Module, model).named_modules() if isinstance(module, LoraLinear)
    }
    for layer in layers.values():
        # peft makes A and B in the model's dtype; a step is smaller than what bfloat16 can tell apart.
        layer.lora_A[ADAPTER].float()
        layer.lora_B[ADAPTER].float()
    # LoRA's alpha / r; peft's rank-stabilised alpha / sqrt(r) is not used.
    scaling = spec.alpha / spec.rank
    merged_layers = None
    if model.dtype not in (torch.float32, torch.float64):
        merged_layers = MergedLayers(cast(nn.Module, model), layers, adapter=ADAPTER, scaling=scaling)
    return Adapters(layers=layers, scaling=scaling, merged_layers=merged_layers)


def base_name(name: str) -> str:
    """Returns the name that a parameter of a model with adapters has in the model as it was."""
    return name.replace(".base_layer.", ".")


def is_adapter_name(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def chosen_layers(model: PreTrainedModel, spec: LoraSpec, out_of_reach: Collection[str]) -> dict[str, nn.Module]:
    """Returns the layers that get an adapter, by name, in the order of the model.

    Args:
        model: The model, without adapters; on the meta device will do.
        spec: The job's.
        out_of_reach: The names of the parameters that no gradient can reach.

    Raises:
        InvalidInput: As `attach_adapters` raises it for a name.
    """
    modules = {
        name: module for name, module in cast(nn.Module, model).named_modules() if f"{name}.weight" not in out_of_reach
    }
    if spec.target_modules == (ALL_LINEAR,):
        head = model.get_output_embeddings()
        chosen = {
            name: module for name, module in modules.items() if type(module) in PLAIN_LINEAR and module is not head
        }
        if not chosen:
            raise InvalidInput("no layer of the model is an nn.Linear", field=TARGETS, cure=_layer_words(modules))
    else:
        named: dict[str, nn.Module] = {}
        for target in spec.target_modules:
            fitting = {name: module for name, module in modules.items() if f".{name}".endswith(f".{target}")}
            if not fitting:
                raise InvalidInput(f"`{target}` is no layer of the model", field=TARGETS, cure=_layer_words(modules))
            named |= fitting
        chosen = {name: module for name, module in modules.items() if name in named}
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    for name, module in chosen.items():
        if type(module) not in PLAIN_LINEAR:
            problem = f"{name} is a {type(module).__name__}, adapters go into nn.Linear"
            raise InvalidInput(problem, field=TARGETS, cure=_layer_words(modules))
        if cast(nn.Linear, module).weight is embedding.weight:
            raise InvalidInput(
                f"{name} is tied to the embedding, which an adapter of the head would change",
                field=TARGETS,
                cure="leave it out, or use a model whose head has a weight of its own",
            )
    return chosen


def left_frozen(model: PreTrainedModel, chosen: Mapping[str, nn.Module]) -> str:
    """Says in one line which matrices no adapter reaches, such as a mixture's experts; "" where all have one.

    Args:
        model: The model, before or after its adapters are in it.
        chosen: The layers that get an adapter. Embeddings and the head never do unless they are named.
    """
    network = cast(nn.Module, model)
    parts = list(chosen.values())
    parts += [module for module in network.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    if isinstance(head, nn.Module):
        parts.append(head)
    reached = {id(parameter) for part in parts for parameter in part.parameters()}
    named = list(network.named_parameters())
    left = {
        name: parameter.numel() for name, parameter in named if parameter.dim() > 1 and id(parameter) not in reached
    }
    if not left:
        return ""
    # By number of parameters, not of matrices.
    share = sum(left.values()) / sum(parameter.numel() for _, parameter in named)
    # Layer by layer the names differ in a number alone.
    kinds = sorted({LAYER_NUMBER.sub(".*.", name) for name in left})
    names = ", ".join(kinds[:MOST_NAMED])
    if len(kinds) > MOST_NAMED:
        names += ", …"
    return f"{share:.0%} of the parameters stay as they are, since no adapter reaches {names}"


def _layer_words(modules: Mapping[str, nn.Module]) -> str:
    names = sorted({name.rpartition(".")[2] for name, module in modules.items() if type(module) in PLAIN_LINEAR})
    if not names:
        return "this model takes no adapters"
    return f"linear layers of this model end in {', '.join(names)}"
