"""AdamW with moments in float32, and the methods that every optimizer of a trainer has for its state.

A checkpoint keeps of a parameter exp_avg and exp_avg_sq: float32, 8 bytes a parameter together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from contracts.spec.job import OptimizerSpec


class Adamw32bit:
    """torch's fused AdamW, one pass over each parameter; the state of a parameter is named tensors.

    `PolicyOptimizer` creates it and steps its `optimizers`; the other kinds derive from it.
    """

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec) -> None:
        """Creates torch's optimizer.

        Args:
            groups: torch's parameter groups, each with `params`, `weight_decay`, `factor` of the learning rate, and
                `is_hidden`, True for hidden matrices.
            spec: The job's.
        """
        self.optimizers: list[Any] = [torch.optim.AdamW(groups, **adamw_options(spec), fused=True)]

    def of(self, parameter: Tensor) -> Any:
        """Returns the member of `optimizers` that steps a parameter."""
        return self.optimizers[-1]

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """Returns the shape of each state of a parameter, by name."""
        return {"exp_avg": tuple(parameter.shape), "exp_avg_sq": tuple(parameter.shape), "step": ()}

    def num_bytes(self, parameter: Tensor) -> int:
        """Returns the bytes of the state of a parameter, as its first step makes it."""
        return sum(math.prod(shape) for shape in self.shapes(parameter).values()) * parameter.itemsize

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Returns the state of a parameter that was stepped."""
        return {name: self.of(parameter).state[parameter][name] for name in self.shapes(parameter)}

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` returned."""
        # The fused kernel reads its step, a float32, where the parameter is.
        self.of(parameter).state[parameter] = {
            name: tensor.to(parameter.device, torch.float32 if name == "step" else parameter.dtype, copy=True)
            for name, tensor in state.items()
        }


def adamw_options(spec: OptimizerSpec) -> dict[str, Any]:
    """Returns the arguments that every kind of AdamW takes from the spec."""
    # `lr` is set anew before each step; weight decay comes with each group.
    return {"lr": spec.learning_rate, "betas": (spec.beta1, spec.beta2), "eps": spec.epsilon}
