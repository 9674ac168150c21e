"""Activations of a pass that wait in the host's memory for the backward pass, instead of a GPU's.

    forward     a tensor is saved for the backward pass ─▶ copied to page-locked memory of the host, and let go
    backward    the same bytes come back, when the operation needs them

Bytes are copied and never computed: gradients are those of a pass without it, bit for bit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from contracts.spec.trainer import TrainerSpec

LEAST_BYTES = 1 << 20
"""A smaller tensor stays: its copy would take longer than it saves."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """An activation that waits. `to_host` creates it, and `from_host` reads it."""

    copy: Tensor
    """Its numbers and strides, in the host's memory."""
    device: torch.device
    """Where it was, and is needed again."""


@contextlib.contextmanager
def activations_of_pass(
    trainer: TrainerSpec, models: Iterable[nn.Module], *, device_type: str = "cuda"
) -> Iterator[None]:
    """Has a forward pass inside offload its activations, where the job says so and its models are on a GPU.

    Args:
        trainer: The job's.
        models: The models of the pass, whose weights stay where they are.
        device_type: Tensors of this type of device are taken to the host; tests let a CPU play the GPU.
    """
    if not trainer.offloads_activations:
        yield
        return
    parameters = [parameter for model in models for parameter in model.parameters()]
    if parameters[0].device.type != device_type:
        _say_without_effect()
        yield
        return
    # A layer saves a view of its weight. Two tensors in one memory have one address of it.
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    with torch.autograd.graph.saved_tensors_hooks(partial(to_host, weights=weights), from_host):
        yield


def to_host(tensor: Tensor, *, weights: Collection[int]) -> Tensor | Waiting:
    """Copies an activation to the host; what isn't worth it stays as it is.

    Args:
        tensor: The tensor that an operation saves for the backward pass.
        weights: Addresses of the memory of weights, which are on the device anyway.
    """
    if tensor.nbytes < LEAST_BYTES or tensor.untyped_storage().data_ptr() in weights:
        return tensor
    # One that has a number in several places, or gaps, would come back with other strides, and kernels choose their
    # order of sums by those.
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        return tensor
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    # In the stream of the pass: what it computes next waits for no copy of the host's, and the memory that is let go
    # is taken again behind it.
    copy.copy_(tensor, non_blocking=True)
    return Waiting(copy=copy, device=tensor.device)


def from_host(saved: Any) -> Tensor:
    """Brings an activation back. Torch keeps page-locked memory until a copy out of it is done."""
    if isinstance(saved, Waiting):
        return saved.copy.to(saved.device, non_blocking=True)
    return saved


@cache
def _say_without_effect() -> None:
    """Says once in a process that nothing is offloaded."""
    log.info("trainer.offload_activations has no effect on a CPU, whose memory is the host's")
