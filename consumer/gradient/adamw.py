"""The optimizers that `optimizer.type` names, and what of their state a checkpoint keeps, as tensors.

adamw         exp_avg, exp_avg_sq: float32, 8 bytes a parameter
adamw_8bit    state1, state2: a byte each and a float32 for 256 of them (arXiv 2110.02861), by bitsandbytes
              parameters of fewer than 4,096 items: float32
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from contracts.errors import ContractViolation, InvalidInput
from contracts.spec import OptimizerSpec

BLOCK_ITEMS = 256
SMALLEST_8BIT_ITEMS = 4096
"""bitsandbytes' own choice: below it the bytes saved are few, and norms and biases are sensitive."""


class Adamw(Protocol):
    """An optimizer of torch's kind, whose state of a parameter is named tensors."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        """Of a parameter's state, by name."""
        ...

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Of a parameter that was stepped."""
        ...

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Takes what `state` answered."""
        ...


def make_adamw(
    parameters: Iterable[nn.Parameter], spec: OptimizerSpec, *, undecayed: Iterable[nn.Parameter] = ()
) -> Adamw:
    """undecayed: more parameters, which are stepped without weight decay.

    Raises InvalidInput where the library of the one that the spec names isn't installed.
    """
    options: dict[str, Any] = {"lr": spec.learning_rate, "betas": (spec.beta1, spec.beta2), "eps": spec.epsilon}
    groups = [
        {"params": list(parameters), "weight_decay": spec.weight_decay},
        {"params": list(undecayed), "weight_decay": 0.0},
    ]
    # Neither library takes an empty group everywhere.
    groups = [group for group in groups if group["params"]]
    return Adamw32bit(groups, options) if spec.type == "adamw" else Adamw8bit(groups, options)


def load_checked(adamw: Adamw, name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """`Adamw.load`. Raises ContractViolation naming the parameter for a state of other shapes."""
    if {key: tuple(tensor.shape) for key, tensor in state.items()} != adamw.shapes(parameter):
        raise ContractViolation("the optimizer state has another shape than its parameter", field=name)
    adamw.load(parameter, state)


class Adamw32bit:
    """torch's fused AdamW: one pass over each parameter."""

    def __init__(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        self.optimizer = torch.optim.AdamW(groups, **options, fused=True)

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        return {"exp_avg": tuple(parameter.shape), "exp_avg_sq": tuple(parameter.shape), "step": ()}

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: self.optimizer.state[parameter][name] for name in self.shapes(parameter)}

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        # The fused kernel reads its step, a float32, where the parameter is.
        self.optimizer.state[parameter] = {
            name: tensor.to(parameter.device, torch.float32 if name == "step" else parameter.dtype, copy=True)
            for name, tensor in state.items()
        }


class Adamw8bit:
    """bitsandbytes' AdamW with blockwise quantised moments, on CUDA and on the CPU; deterministic on both."""

    def __init__(self, groups: list[dict[str, Any]], options: dict[str, Any]) -> None:
        try:
            from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InvalidInput(
                "bitsandbytes is not installed", field="optimizer.type", cure='pip install "onbeat[adamw8bit]"'
            ) from error
        self.optimizer = AdamW8bit(groups, **options, min_8bit_size=SMALLEST_8BIT_ITEMS)

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        shape = tuple(parameter.shape)
        shapes = {"state1": shape, "state2": shape, "step": ()}
        if parameter.numel() >= SMALLEST_8BIT_ITEMS:
            num_blocks = -(-parameter.numel() // BLOCK_ITEMS)
            shapes |= {"absmax1": (num_blocks,), "absmax2": (num_blocks,)}
        return shapes

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.optimizer.state[parameter]
        return {name: torch.as_tensor(state[name]) for name in self.shapes(parameter)}

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        loaded: dict[str, Any] = {name: tensor.to(parameter.device, copy=True) for name, tensor in state.items()}
        loaded["step"] = int(state["step"])
        if "absmax1" in state:
            # What a byte stands for; the same for all.
            loaded["qmap1"] = self.optimizer.name2qmap["dynamic"].to(parameter.device)
            loaded["qmap2"] = self.optimizer.name2qmap["udynamic"].to(parameter.device)
        self.optimizer.state[parameter] = loaded
