"""Muon for hidden matrices, AdamW for all else.

A checkpoint keeps of a hidden matrix momentum_buffer: float32, 4 bytes a parameter; of all else what AdamW has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from consumer.gradient.optimizers.adamw import Adamw32bit
from contracts.spec.job import OptimizerSpec


class MuonAndAdamw(Adamw32bit):
    """torch's Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") and its AdamW.

    A step of Muon is as large as one of AdamW at the same learning rate: 0.2 times the root of a matrix's longer side,
    as Liu et al. have it (arXiv 2502.16982, equation 4).
    """

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec) -> None:
        hidden = [group for group in groups if group["is_hidden"]]
        others = [group for group in groups if not group["is_hidden"]]
        self._hidden = {parameter for group in hidden for parameter in group["params"]}
        super().__init__(others, spec)
        # Muon first: `of` finds it at 0.
        self.optimizers.insert(0, torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw"))

    def of(self, parameter: Tensor) -> Any:
        # By identity: parameters hash by what they are, not by their numbers.
        return self.optimizers[0 if parameter in self._hidden else 1]

    def shapes(self, parameter: Tensor) -> dict[str, tuple[int, ...]]:
        if parameter in self._hidden:
            return {"momentum_buffer": tuple(parameter.shape)}
        return super().shapes(parameter)
