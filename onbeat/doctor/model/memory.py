"""Bytes that a rank of the trainer needs, by closed formulas of shapes and of the job's keys (docs/hardware.md#memory).

What is kept and what a step needs are counted. The activations of a pass are an estimate: of a token each linear layer
leaves its inputs and its outputs for the backward pass, in the model's dtype. It leaves out the scores of an attention
that isn't fused, and float32 copies in a narrower model; tests hold it against what passes leave, within a factor of 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import UNSET

from contracts.spec.job import JobSpec
from onbeat.doctor.model.job import num_ranks, tokens_of_a_pass
from onbeat.doctor.model.report import Memory, MemoryPart

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
GROUP_BYTES = {"cpu": 32 * 2**20, "cuda": 256 * 2**20}
"""Gradients of a step that are there at a time, as consumer/gradient/optimizer.py has them."""
CHUNK_LOGITS = 2**25
"""Logits that are there at a time, as consumer/model/language_head.py has them."""
GRADIENTS_OF_LARGEST = 3
"""Gradients that are there at a time where each goes as soon as it is in the sums: a tied embedding has one of each of
its two uses, and their sum."""
LOGITS_COPIES = 3
"""The logits, their log-probs and their gradient."""
BLOCK_ITEMS = 256
SMALLEST_8BIT_ITEMS = 4096
"""As consumer/gradient/optimizers/adamw_8bit.py has them."""


@dataclass(frozen=True, kw_only=True)
class ParameterSize:
    """A parameter of the model. `shape_of` creates it."""

    name: str
    shape: tuple[int, ...]
    is_reached: bool
    """True where a gradient reaches it."""
    is_hidden: bool
    """True for a matrix that is neither an embedding nor the head: Muon steps it."""
    is_head: bool
    """True for the weight of an output head that isn't the embedding."""
    layer: str
    """The layer with which FSDP2 gathers it; "" for what is outside the layers."""

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    def items_of_rank(self, world_size: int) -> int:
        """Returns the items of the first rank's rows."""
        if world_size == 1 or not self.shape:
            return self.num_items
        # Rows rounded up, times the items of a row.
        return -(-self.shape[0] // world_size) * math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that decide what a rank needs. `shape_of` reads them from a model without memory."""

    parameters: tuple[ParameterSize, ...]
    buffer_bytes: int
    """Bytes of the buffers that a version has."""
    adapters: tuple[tuple[int, int], ...]
    """(inputs, outputs) of each layer with an adapter; () for a job without."""
    adapted_items: int
    """Items of the weights of those layers."""
    token_items: int
    """Inputs and outputs of the linear layers that a token goes through, the head apart."""
    num_layers: int
    hidden_size: int
    vocabulary_size: int

    def trained(self) -> list[ParameterSize]:
        return [parameter for parameter in self.parameters if parameter.is_reached]


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor that a rank trains, as its share has it."""

    num_items: int
    is_hidden: bool


def memory_of(sizes: ModelSizes, spec: JobSpec, *, device: str) -> Memory:
    """Counts the bytes that a rank needs.

    Args:
        sizes: The model's sizes.
        spec: The job; its dtype, optimizer, accumulation, sharding, adapters, reference, limit of a pass and what it
            offloads count.
        device: "cpu" or "cuda".
    """
    is_sharded = spec.trainer.sharding == "fsdp"
    world_size = num_ranks(spec) if is_sharded else 1
    item_bytes = DTYPE_BYTES[spec.model.dtype]
    lora = spec.trainer.lora
    trained = _of_adapters(sizes, lora.rank) if lora is not None else _of_model(sizes, spec, world_size)
    trained_item_bytes = 4 if lora is not None else item_bytes
    num_trained = sum(tensor.num_items for tensor in trained)
    of_model = sum(parameter.items_of_rank(world_size) for parameter in sizes.parameters)
    permanent = [_part("weights", of_model * item_bytes + sizes.buffer_bytes, f"{item_bytes} bytes a parameter")]
    if lora is not None:
        permanent.append(_part("adapters", 4 * num_trained, "A and B, float32"))
        if item_bytes < 4:
            permanent.append(
                _part("merged layers", item_bytes * sizes.adapted_items, "of each adapted weight once more")
            )
    elif spec.algorithm.advantage_kind.has_critic:
        permanent.append(_part("critic", item_bytes * _critic_items(sizes), "the model again, with a head of one row"))
    state: list[MemoryPart] = []
    if trained_item_bytes < 4:
        state.append(_part("masters", 4 * num_trained, "float32, 4 bytes a trained parameter"))
    state.append(_moments(trained, spec.optimizer.type))
    elsewhere: list[MemoryPart] = []
    place = state_place(spec, device=device)
    if place:
        elsewhere += [part.elsewhere(place) for part in state]
    else:
        permanent += state
    sum_bytes = 8 if spec.trainer.accumulation == "exact" else 4
    permanent.append(_part("sums", sum_bytes * num_trained, f"{sum_bytes} bytes a trained parameter"))
    if spec.loads_reference and lora is None:
        permanent.append(_reference(of_model, item_bytes, spec))
    in_a_pass = [*_activations(sizes, spec, item_bytes, on_host=False, device=device)]
    elsewhere += _activations(sizes, spec, item_bytes, on_host=True, device=device)
    if is_sharded:
        in_a_pass.append(_gathered(sizes, item_bytes, sum_bytes, with_gradient=lora is None))
    largest = max((tensor.num_items for tensor in trained), default=0)
    if not is_sharded or lora is not None:
        num_gradients = num_trained
        says = "of the pass, in the parameters' dtype"
        if spec.trainer.frees_gradients:
            num_gradients = min(num_trained, GRADIENTS_OF_LARGEST * largest)
            says = "of the largest tensor, of each of its uses"
        in_a_pass.append(_part("gradient", trained_item_bytes * num_gradients, says))
    group_bytes = min(4 * num_trained, max(GROUP_BYTES[device], 4 * largest))
    in_a_step = [_part("gradients", group_bytes, "float32, of a group of parameters")]
    if place:
        # The share of the group in all that is trained: 4 bytes of gradient to each of its parameters.
        of_group = sum(part.num_bytes for part in state) * group_bytes // max(1, 4 * num_trained)
        in_a_step.append(_part("state", of_group, "masters and moments of the group"))
    if is_sharded and lora is None:
        whole = max((parameter.num_items for parameter in sizes.trained()), default=0)
        in_a_step.append(_part("gathered", 4 * whole, "the largest tensor, float32, for the norm"))
    return Memory(
        permanent=tuple(permanent),
        in_a_pass=tuple(in_a_pass),
        in_a_step=tuple(in_a_step),
        elsewhere=tuple(part for part in elsewhere if part.num_bytes),
    )


def state_place(spec: JobSpec, *, device: str) -> str:
    """Returns where the optimizer's state is between two steps: "the host", "the disk", or "" for the device."""
    if spec.optimizer.offload is UNSET or (spec.optimizer.offload == "host" and device == "cpu"):
        # A CPU's memory is the host's.
        return ""
    return f"the {spec.optimizer.offload}"


def adapter_items(sizes: ModelSizes, rank: int) -> int:
    """Counts the parameters of the adapters: A [rank, inputs] and B [outputs, rank] of each layer."""
    return sum(rank * (num_inputs + num_outputs) for num_inputs, num_outputs in sizes.adapters)


def _part(name: str, num_bytes: int, says: str) -> MemoryPart:
    return MemoryPart(name=name, num_bytes=num_bytes, says=says)


def _of_model(sizes: ModelSizes, spec: JobSpec, world_size: int) -> list[_Tensor]:
    trained = [
        _Tensor(num_items=parameter.items_of_rank(world_size), is_hidden=parameter.is_hidden)
        for parameter in sizes.trained()
    ]
    if not spec.algorithm.advantage_kind.has_critic:
        return trained
    of_critic = [
        _Tensor(num_items=parameter.num_items, is_hidden=parameter.is_hidden)
        for parameter in sizes.trained()
        if not parameter.is_head
    ]
    # Its head: a row, which is no hidden matrix, and a bias.
    head = [_Tensor(num_items=sizes.hidden_size, is_hidden=False), _Tensor(num_items=1, is_hidden=False)]
    return [*trained, *of_critic, *head]


def _of_adapters(sizes: ModelSizes, rank: int) -> list[_Tensor]:
    matrices = [rank * width for layer in sizes.adapters for width in layer]
    return [_Tensor(num_items=num_items, is_hidden=True) for num_items in matrices]


def _critic_items(sizes: ModelSizes) -> int:
    body = sum(parameter.num_items for parameter in sizes.parameters if not parameter.is_head)
    return body + sizes.hidden_size + 1


def _moments(trained: list[_Tensor], optimizer: str) -> MemoryPart:
    if optimizer == "adamw_8bit":
        num_bytes = sum(map(_quantized_bytes, trained))
        return _part("moments", num_bytes, "2 bytes a trained parameter, and a float32 for each block of 256")
    if optimizer == "muon":
        num_bytes = sum((4 if tensor.is_hidden else 8) * tensor.num_items for tensor in trained)
        return _part("moments", num_bytes, "float32: one of hidden matrices, two of all else")
    return _part("moments", sum(8 * tensor.num_items for tensor in trained), "two in float32, 8 bytes each")


def _quantized_bytes(tensor: _Tensor) -> int:
    if tensor.num_items < SMALLEST_8BIT_ITEMS:
        return 8 * tensor.num_items
    num_blocks = -(-tensor.num_items // BLOCK_ITEMS)  # rounded up
    return 2 * (tensor.num_items + 4 * num_blocks)


def _reference(of_model: int, item_bytes: int, spec: JobSpec) -> MemoryPart:
    # Of a mixture with the policy, a model below float32 keeps float32 averages.
    has_averages = (spec.algorithm.ref_model_mixup_alpha or 1.0) < 1.0 and item_bytes < 4
    of_item = item_bytes + 4 if has_averages else item_bytes
    return _part("reference", of_item * of_model, f"{of_item} bytes a parameter")


def _gathered(sizes: ModelSizes, item_bytes: int, sum_bytes: int, *, with_gradient: bool) -> MemoryPart:
    """Counts what is whole at a time of a model that ranks share: a layer, and what is outside the layers."""
    of_layers: dict[str, int] = {}
    for parameter in sizes.parameters:
        of_layers[parameter.layer] = of_layers.get(parameter.layer, 0) + parameter.num_items
    # The outermost parameters stay whole until the pass is over.
    outside = of_layers.pop("", 0)
    layer = max(of_layers.values(), default=0)
    num_bytes = item_bytes * (outside + layer)
    if with_gradient:
        # One part's gradient at a time, and the integers of it.
        num_bytes += (item_bytes + sum_bytes) * max(outside, layer)
    return _part("gathered", num_bytes, "a layer and what is outside the layers, whole, with the gradient of one")


def _activations(sizes: ModelSizes, spec: JobSpec, item_bytes: int, *, on_host: bool, device: str) -> list[MemoryPart]:
    """Counts the activations of a pass, and its logits.

    Args:
        sizes: The model's.
        spec: The job.
        item_bytes: Bytes of an activation.
        on_host: True for the part that waits on the host, False for the part on the device.
        device: "cpu" or "cuda".
    """
    num_tokens = tokens_of_a_pass(spec)
    # All of the layer that is computed, or computed again.
    of_layer = sizes.token_items // max(1, sizes.num_layers)
    waiting = sizes.token_items
    if spec.trainer.gradient_checkpointing and sizes.num_layers:
        # Each layer's input.
        waiting = sizes.num_layers * sizes.hidden_size
    offloads = spec.trainer.offloads_activations and device == "cuda"
    if on_host:
        num_bytes = num_tokens * waiting * item_bytes if offloads else 0
        return [_part("activations", num_bytes, "an estimate").elsewhere("the host")]
    of_token = waiting
    if offloads:
        of_token = of_layer
    elif spec.trainer.gradient_checkpointing and sizes.num_layers:
        of_token = waiting + of_layer
    num_logits = min(num_tokens * sizes.vocabulary_size, CHUNK_LOGITS)
    return [
        _part("activations", num_tokens * of_token * item_bytes, f"an estimate, of {num_tokens} tokens, within twice"),
        _part("logits", LOGITS_COPIES * 4 * num_logits, "of a chunk of tokens, float32"),
    ]
