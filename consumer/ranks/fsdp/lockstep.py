"""Ranks that share one model's parameters pass through it at the same time, however many batches each of them has.

rank 0   batch a ── pass ── pass ── through                  ┐ before each pass all say what they are about to do,
rank 1   batch b ── pass ── idle ── through                  │ and a rank with nothing to do goes along idly
rank 2   (none)  ── idle ── idle ── through                  ┘
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel

from consumer.model.adapters import Adapters
from consumer.model.rows import store_errors
from onbeat.base.routers import without_replay


class Pass(IntEnum):
    """A pass that a rank is about to make; where ranks want different ones, the lowest comes first."""

    NONE = 0
    REFERENCE = 1
    """Forward, through the reference, or through the policy without its adapters where that is the reference."""
    FORWARD = 2
    """Forward without gradient, through the policy."""
    GRADIENT = 3
    """Forward and backward, through the policy."""


@dataclass(eq=False)
class Lockstep:
    """A rank's step with the others. Every rank makes one, and calls `through` after each of its turns."""

    policy: PreTrainedModel
    reference: PreTrainedModel | None
    """None also where the policy without `adapters` is it."""
    _: KW_ONLY
    mute: Callable[[bool], None]
    """`ShardedAccumulator.mute`."""
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        self._is_idle = False
        self._watch(self.policy, self._kind)
        if self.reference is not None:
            self._watch(self.reference, lambda: Pass.REFERENCE)

    def _kind(self) -> Pass:
        if self.adapters is not None and any(layer.disable_adapters for layer in self.adapters.layers.values()):
            return Pass.REFERENCE
        return Pass.GRADIENT if torch.is_grad_enabled() else Pass.FORWARD

    def through(self) -> None:
        """Returns when no rank has a pass left in this turn."""
        self._wait_for_turn(Pass.NONE)
        # A pass without gradient leaves the outermost parameters whole, and a step moves their rows alone.
        cast(FSDPModule, self.policy).reshard()

    def _watch(self, model: PreTrainedModel, kind: Callable[[], Pass]) -> None:
        def before(_module: nn.Module, _inputs: Any) -> None:
            if not self._is_idle:
                self._wait_for_turn(kind())

        # First of the hooks: FSDP2's own gathers parameters, for which all ranks must be there.
        cast(nn.Module, model).register_forward_pre_hook(before, prepend=True)

    def _wait_for_turn(self, wanted: Pass) -> None:
        while (common := self._common(wanted)) is not wanted:
            self._is_idle = True
            self.mute(True)
            try:
                self._pass(common)
            finally:
                self.mute(False)
                self._is_idle = False

    def _common(self, wanted: Pass) -> Pass:
        """The lowest kind that some rank wants; NONE where no rank wants one."""
        # [kinds] how many ranks want each; the sum is the same on every rank, and so is the choice.
        wishes = torch.zeros(len(Pass), dtype=torch.int64)
        wishes[wanted] = 1
        with store_errors():
            dist.all_reduce(wishes)
        # In the order of the kinds: NONE, the lowest, is for where nothing else is left.
        return next((kind for kind in Pass if kind is not Pass.NONE and wishes[kind] > 0), Pass.NONE)

    def _pass(self, kind: Pass) -> None:
        is_reference = kind is Pass.REFERENCE
        model = self.reference if is_reference and self.reference is not None else self.policy
        # A pass gathers the rows of all ranks: each must hold those of the weights that the pass goes through.
        without = self.adapters.disabled() if is_reference and self.adapters is not None else nullcontext()
        # The smallest input: all that counts is that each layer is gathered once.
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        # This rank may be about to pass through with routes of its own, which are of other tokens.
        with without, without_replay(model), torch.set_grad_enabled(kind is Pass.GRADIENT):
            logits = model(input_ids=tokens, use_cache=False).logits
            if kind is Pass.GRADIENT:
                # Any scalar: what it leaves is dropped, and `mute` has this rank add zeros. Each rank must take part in
                # the reduce-scatter of each layer.
                logits.float().sum().backward()
                for parameter in cast(nn.Module, model).parameters():
                    parameter.grad = None
