"""AdamW with quantised moments, by bitsandbytes (Dettmers et al., arXiv 2110.02861).

A checkpoint keeps of a parameter state1 and state2: a byte each, and a float32 for 256 of them; of parameters of fewer
than 4,096 items float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from consumer.gradient.optimizers.adamw import Adamw32bit, adamw_options
from contracts.errors import InvalidInput
from contracts.spec.job import OptimizerSpec

BLOCK_ITEMS = 256
SMALLEST_8BIT_ITEMS = 4096
"""bitsandbytes' own choice: below it the bytes saved are few, and norms and biases are sensitive."""


class Adamw8bit(Adamw32bit):
    """bitsandbytes' AdamW with blockwise quantised moments, on CUDA and on the CPU; deterministic on both."""

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec) -> None:
        try:
            from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InvalidInput(
                "bitsandbytes is not installed", field="optimizer.type", cure='pip install "onbeat[adamw8bit]"'
            ) from error
        self.optimizers = [AdamW8bit(groups, **adamw_options(spec), min_8bit_size=SMALLEST_8BIT_ITEMS)]

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        shapes = {"state1": shape, "state2": shape, "step": ()}
        if parameter.numel() >= SMALLEST_8BIT_ITEMS:
            num_blocks = -(-parameter.numel() // BLOCK_ITEMS)  # rounded up
            shapes |= {"absmax1": (num_blocks,), "absmax2": (num_blocks,)}
        return shapes

    def num_bytes(self, parameter: Tensor) -> int:
        # Two moments, a byte each where they are quantised; the scales of blocks are few.
        item_bytes = 1 if parameter.numel() >= SMALLEST_8BIT_ITEMS else parameter.itemsize
        return 2 * parameter.numel() * item_bytes

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.of(parameter).state[parameter]
        return {name: torch.as_tensor(state[name]) for name in self.shapes(parameter)}

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        loaded: dict[str, Any] = {name: tensor.to(parameter.device, copy=True) for name, tensor in state.items()}
        loaded["step"] = int(state["step"])
        if "absmax1" in state:
            # The tables of what a byte stands for are the same for all parameters.
            loaded["qmap1"] = self.of(parameter).name2qmap["dynamic"].to(parameter.device)
            loaded["qmap2"] = self.of(parameter).name2qmap["udynamic"].to(parameter.device)
        self.of(parameter).state[parameter] = loaded
