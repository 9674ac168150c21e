"""Layers with adapters in a model below float32: a pass goes through the merged weight as it is rounded.

    forward     y = W'x,  W' = W + scaling · B A, rounded: what generators hold, and sample with
    backward    dA = scaling · (dy B)ᵀ x,  dB = scaling · dyᵀ (x Aᵀ),  dx = dy W': as if nothing had been rounded

Most of a step is smaller than what bfloat16 tells apart in W. Applied beside W, as peft does it, the trainer would see
all of the step, and the generators what is left of it: it would train a policy that was not sampled. So A and B are to
W' what float32 masters are to a bfloat16 parameter (consumer/gradient/optimizer.py): its gradient goes to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from consumer.model.rows import first_row, local_rows, spread_like
from onbeat.weights.adapter.matrices import CHUNK_ITEMS, merge_into

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear


class MergedLayers:
    """The layers of one model: each holds its merged weight, and this object the base's, as many bytes again.

    Both are this rank's rows where ranks share the weight. `attach_adapters` creates it; `merge` changes the layers
    after each optimizer step, and publishing reads `base`.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, LoraLinear], *, adapter: str, scaling: float) -> None:
        self._model = model
        self._layers = layers
        self._adapter = adapter
        self._scaling = scaling
        self._base: dict[str, Tensor] = {}
        """Rows by layer; empty while no adapter has moved, and the layers hold the base themselves."""
        for layer in layers.values():
            cast(Any, layer).forward = functools.partial(_forward, layer, adapter=adapter, scaling=scaling)

    def merge(self) -> None:
        """Merges A and B as they are now into this rank's rows of the layers' weights."""
        self._reshard()
        for name, layer in self._layers.items():
            weight = weight_of(layer.base_layer)
            rows = local_rows(weight)
            if name not in self._base:
                # Before the first merge the layer holds the base itself.
                self._base[name] = rows.clone()
            lora_a, lora_b = matrices(layer, self._adapter)
            merge_into(
                rows,
                self._base[name],
                lora_a=lora_a.detach(),
                lora_b=lora_b.detach(),
                scaling=self._scaling,
                first_row=first_row(weight) if isinstance(weight, DTensor) else 0,
            )

    def base(self) -> dict[str, Tensor]:
        """Returns layer → its weight without the adapter, spread over the ranks as the layer's is."""
        return {name: spread_like(rows, weight_of(self._layers[name].base_layer)) for name, rows in self._base.items()}

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Lets the layers hold the base's weights inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        self._reshard()
        for name, rows in self._base.items():
            layer_rows = local_rows(weight_of(self._layers[name].base_layer))
            # A chunk at a time, so that the copy needs no memory for a whole weight.
            for in_layer, aside in zip(_chunks(layer_rows), _chunks(rows), strict=True):
                before = in_layer.clone()
                in_layer.copy_(aside)
                aside.copy_(before)

    def _reshard(self) -> None:
        """Lets the outermost parameters go, which a pass leaves whole: the next would go through them as they were."""
        if isinstance(self._model, FSDPModule):
            self._model.reshard()


class _ToMatrices(torch.autograd.Function):
    """The identity on a layer's output, whose gradient goes on to A and B, too.

    The merged weight W' is no function of A and B for autograd, so their gradients are computed here.

    The rank is r here: output [..., outputs], inputs [..., inputs], lora_a [r, inputs], lora_b [outputs, r].
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(inputs, lora_a, lora_b)
        ctx.scaling = scaling
        # A view: autograd wants another tensor than its input, and no number changes.
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, lora_a, lora_b = ctx.saved_tensors
        # [tokens, outputs] and [tokens, inputs]; tokens are summed over by the products.
        rows = gradient.flatten(0, -2).to(lora_a.dtype)
        states = inputs.flatten(0, -2).to(lora_a.dtype)
        # The product with the small matrix comes first: it is [tokens, r] both times.
        of_a = ctx.scaling * (rows @ lora_b).T @ states
        # [outputs, tokens] · [tokens, r] = [outputs, r], as B is; the line above gives [r, inputs], as A is.
        of_b = ctx.scaling * (rows.T @ (states @ lora_a.T))
        # The output's gradient goes on unchanged to the layer, which makes dx = dy W' of it. None for `inputs`: the
        # layer gives them theirs.
        return gradient, None, of_a, of_b, None


def _forward(layer: LoraLinear, inputs: Tensor, *, adapter: str, scaling: float) -> Tensor:
    """Replaces the forward of peft's layer."""
    output = layer.base_layer(inputs)
    if layer.disable_adapters:
        return output
    return cast(Tensor, _ToMatrices.apply(output, inputs, *matrices(layer, adapter), scaling))


def _chunks(rows: Tensor) -> tuple[Tensor, ...]:
    """Returns flat views of at most CHUNK_ITEMS items; none of a rank without rows."""
    if not rows.numel():
        return ()
    return rows.view(-1).split(CHUNK_ITEMS)


def weight_of(linear: nn.Module) -> nn.Parameter:
    return cast(nn.Parameter, linear.weight)


def matrices(layer: LoraLinear, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A [rank, inputs] and B [outputs, rank] of a layer."""
    return weight_of(layer.lora_A[adapter]), weight_of(layer.lora_B[adapter])
