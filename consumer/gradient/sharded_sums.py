"""A model whose parameters are spread over the ranks by rows: torch's FSDP2, with gradients that add up exactly.

    forward, backward of a layer     its parameters are gathered, used, and let go
    its gradient, on each rank       rounded to 64-bit fixed point, then reduce-scattered as integers (I7)
    optimizer                        steps the rows that its rank keeps

FSDP2 itself would add floats, in an order that depends on which rank trained which batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from consumer.gradient.accumulation import check_range
from contracts.errors import ContractViolation

SCALE_BITS = 40
"""The scale of `ExactAccumulator`: the sums are the same integers."""


@dataclass(kw_only=True)
class Part:
    """A parameter's place in what its layer's reduce-scatter answers."""

    padded_items: int
    """Items of each rank's share: as many rows as the first rank has, padding behind the rank's own."""
    sums: Tensor
    """[items] int64 of this rank's rows."""


class SummingReduceScatter:
    """FSDP2's `ReduceScatter` of one layer: the sums stay here, and FSDP2 is answered zeros.

    A rollout batch adds less than `limit`, so that the sums cannot wrap.
    """

    def __init__(self, name: str, parts: Sequence[Part], *, limit: float) -> None:
        self._name = name
        self._parts = parts
        self._limit = limit
        self.reached = 0.0
        """Largest magnitude that the passes of the open rollout batch can have added up to."""
        self.is_muted = False
        """Whether this rank only keeps step: its pass belongs to no batch and adds zeros."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """input_tensor: [world_size * padded items] the layer's gradient, in the parameters' dtype, rank by rank.

        output_tensor: [padded items] FSDP2's gradient of this rank's rows, which becomes zeros.
        """
        if self.is_muted:
            addends = torch.zeros(input_tensor.shape, dtype=torch.int64, device=input_tensor.device)
        else:
            self.reached += check_range({self._name: input_tensor}, limit=self._limit - self.reached)
            # One rounding, before anything is added: a power of two only moves the exponent.
            addends = input_tensor.mul_(2.0**SCALE_BITS).round_().to(torch.int64)
        summed = torch.empty(output_tensor.shape, dtype=torch.int64, device=output_tensor.device)
        dist.reduce_scatter_single(summed, addends, group=group)
        if summed.numel() != sum(part.padded_items for part in self._parts):
            raise ContractViolation("a parameter of the layer has no gradient", field=self._name)
        for part, items in zip(self._parts, summed.split([p.padded_items for p in self._parts]), strict=True):
            # Padding stands behind the rows.
            part.sums.add_(items[: part.sums.numel()])
        output_tensor.zero_()


class ShardedAccumulator:
    """A `GradientAccumulator` of sharded parameters: each rank has the sums of its rows, over all ranks.

    The same integers as `ExactAccumulator` adds up. Memory: 8 bytes a parameter, over all ranks.
    """

    sums: Tensor | None = None
    """None: the ranks have added up already."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        targets: Mapping[str, nn.Parameter],
        max_micro_batches: int,
    ) -> None:
        """targets: this rank's rows by the parameters' names."""
        self._parameters = dict(parameters)
        self._targets = dict(targets)
        self._sums = {
            name: torch.zeros(target.numel(), dtype=torch.int64, device=target.device)
            for name, target in targets.items()
        }
        self._layers = self._take_over(model, limit=2.0 ** (62 - SCALE_BITS) / max_micro_batches)

    def mute(self, is_muted: bool) -> None:
        """Sets whether this rank's passes add zeros, as an idle rank's do."""
        for layer in self._layers:
            layer.is_muted = is_muted

    def add(self, *, to_baseline: bool = False, more: bool = False) -> None:
        """Clears the gradients: the backward pass has added to the sums already, and left zeros."""
        assert not to_baseline, "refused by the spec"
        for parameter in self._parameters.values():
            parameter.grad = None
        for layer in self._layers:
            layer.reached = layer.reached if more else 0.0

    def total(self, divisor: float, *, baseline: float = 0.0) -> None:
        for name, target in self._targets.items():
            total = self._sums[name].double().div_(2.0**SCALE_BITS * divisor)
            target.grad = total.to(target.dtype).view(target.shape)

    def zero(self) -> None:
        for sums in self._sums.values():
            sums.zero_()

    def _take_over(self, model: nn.Module, *, limit: float) -> list[SummingReduceScatter]:
        names = {parameter: name for name, parameter in self._parameters.items()}
        layers = []
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            parts = [
                Part(
                    padded_items=-(-parameter.shape[0] // dist.get_world_size()) * math.prod(parameter.shape[1:]),
                    sums=self._sums[names[parameter]],
                )
                for parameter in layer_parameters(cast(nn.Module, module))
            ]
            layer = SummingReduceScatter(name or "the root", parts, limit=limit)
            module.set_custom_reduce_scatter(layer)  # pyright: ignore[reportArgumentType]
            layers.append(layer)
        return layers


def layer_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that FSDP2 moves together with `module`, in its order: children first, no inner layer."""
    found: dict[nn.Parameter, None] = {}
    for child in module.children():
        if not isinstance(child, FSDPModule):
            found |= dict.fromkeys(layer_parameters(child))
    return list(found | dict.fromkeys(module.parameters(recurse=False)))
