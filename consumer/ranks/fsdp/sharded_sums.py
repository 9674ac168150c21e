"""A model whose parameters are spread over the ranks by rows: torch's FSDP2, with gradients that add up exactly.

    forward, backward of a layer     its parameters are gathered, used, and let go
    its gradient, on each rank       rounded to 64-bit fixed point, then reduce-scattered as integers (I7)
    optimizer                        steps the rows that its rank keeps

FSDP2 itself would add floats, in an order that depends on which rank trained which batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from consumer.gradient.accumulation import ExactAccumulator, OpenSums, SumsMemory, check_range, fixed_point
from contracts.errors import ContractViolation


class SummingReduceScatter:
    """FSDP2's `ReduceScatter` of one layer: the sums stay here, and FSDP2 is answered zeros.

    A rollout batch adds less than the limit of the open sums' range, so that they cannot wrap.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[tuple[int, str]],
        *,
        memory: SumsMemory,
        open_sums: OpenSums,
        max_micro_batches: int,
    ) -> None:
        """Takes the place of FSDP2's own for one layer.

        Args:
            name: The layer's.
            parts: Of each parameter the items of a rank's share, which has as many rows as the first rank's, and the
                name by which the sums have this rank's rows.
            memory: The accumulator's.
            open_sums: The accumulator's.
            max_micro_batches: The most rollout batches that are added to the sums.
        """
        self._name = name
        self._parts = parts
        self._memory = memory
        self._open = open_sums
        self._max_micro_batches = max_micro_batches
        self.reached = 0.0
        """Largest magnitude that the passes of the open rollout batch can have added up to."""
        self.is_muted = False
        """True: this rank only keeps step. Its pass belongs to no batch and adds zeros."""

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
            sum_range = self._open.range
            limit, layer = sum_range.limit(self._max_micro_batches), {self._name: input_tensor}
            self.reached += check_range(layer, limit=limit, reached=self.reached, sum_range=sum_range)
            # One rounding, before anything is added.
            addends = fixed_point(input_tensor, scale=sum_range.scale)
        summed = torch.empty(output_tensor.shape, dtype=torch.int64, device=output_tensor.device)
        # Integers: the order in which the ranks' addends meet doesn't show (I7).
        dist.reduce_scatter_single(summed, addends, group=group)
        padded_items = [items for items, _ in self._parts]
        if summed.numel() != sum(padded_items):
            problem = "another number of the layer's parameters has a gradient than the trial pass reached"
            raise ContractViolation(problem, field=self._name)
        for (_, parameter), items in zip(self._parts, summed.split(padded_items), strict=True):
            sums = self._memory.of(parameter)
            # Padding stands behind the rows.
            sums.add_(items[: sums.numel()])
        # FSDP2 puts it into `.grad`, where nothing must be left: the sums are here.
        output_tensor.zero_()


class ShardedAccumulator(ExactAccumulator):
    """Sums of sharded parameters: each rank has those of its rows, over all ranks, as the same integers."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        targets: Mapping[str, nn.Parameter],
        max_micro_batches: int,
        frees: bool = False,
    ) -> None:
        """targets: this rank's rows by the parameters' names."""
        super().__init__(parameters, max_micro_batches=max_micro_batches, targets=targets, frees=frees)
        self._layers = self._take_over(model)

    @property
    def sums(self) -> None:
        """None: the ranks have added up already."""

    def _watch(self) -> None:
        """Needs nothing: a layer's gradient is added, and gone, before that of the next one is there."""

    def mute(self, is_muted: bool) -> None:
        """Sets whether this rank's passes add zeros, as an idle rank's do."""
        for layer in self._layers:
            layer.is_muted = is_muted

    def add(self, batch: int = 0, *, more: bool = False) -> None:
        """Clears the gradients: the backward pass has added to the sums already, and left zeros."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for layer in self._layers:
            # Behind the last pass of a batch the next batch begins at 0.
            layer.reached = layer.reached if more else 0.0
        # True is 1: counted once a batch, at its last pass.
        self._memory.witnesses[batch] += not more
        self._open.num_added += not more

    def add_zeros(self) -> None:
        """Clears the gradients: the backward pass has added its zeros already."""
        self.drop_gradients()

    def finish(self) -> None:
        """Each rank calls it at the same time: its sums were complete, and its witnesses those of its own batches."""
        dist.all_reduce(self._memory.witnesses)
        super().finish()

    def _take_over(self, model: nn.Module) -> list[SummingReduceScatter]:
        names = {parameter: name for name, parameter in self._parameters.items()}
        layers = []
        for name, module in model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            parts = [
                (
                    # Rows rounded up, times the items of a row: FSDP2 gives each rank a share of equal length, the last
                    # ones padded.
                    -(-parameter.shape[0] // dist.get_world_size()) * math.prod(parameter.shape[1:]),
                    names[parameter],
                )
                for parameter in layer_parameters(cast(nn.Module, module))
                # FSDP2 leaves a parameter out of its layer's reduce-scatter that has no gradient.
                if parameter in names
            ]
            layer = SummingReduceScatter(
                name or "the root",
                parts,
                memory=self._memory,
                open_sums=self._open,
                max_micro_batches=self._max_micro_batches,
            )
            module.set_custom_reduce_scatter(layer)  # pyright: ignore[reportArgumentType]
            layers.append(layer)
        return layers


def layer_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that FSDP2 moves together with `module`, in its order: children first, no inner layer."""
    parameters: dict[nn.Parameter, None] = {}
    for child in module.children():
        if not isinstance(child, FSDPModule):
            parameters |= dict.fromkeys(layer_parameters(child))
    parameters |= dict.fromkeys(module.parameters(recurse=False))
    return list(parameters)
