"""Ranks that share one model's parameters pass through it at the same time, however many batches each of them has.

rank 0   batch a ── pass ── pass ── through                  ┐ before each pass all say what they are about to do,
rank 1   batch b ── pass ── idle ── through                  │ and who has nothing to do goes along idly
rank 2   (none)  ── idle ── idle ── through                  ┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from consumer.rank_errors import store_errors


class Pass(IntEnum):
    """What a rank is about to do; where they want different things, the lowest one comes first."""

    NONE = 0
    REFERENCE = 1
    """Forward, of the reference."""
    FORWARD = 2
    """Without gradient, of the policy."""
    GRADIENT = 3
    """Forward and backward."""


class Lockstep:
    """Of one rank. Every rank makes one, and calls `through` after each of its turns."""

    def __init__(
        self, policy: PreTrainedModel, reference: PreTrainedModel | None, *, mute: Callable[[bool], None]
    ) -> None:
        """mute: of `ShardedAccumulator`."""
        self._policy = policy
        self._reference = reference
        self._mute = mute
        self._is_idle = False
        self._watch(policy, lambda: Pass.GRADIENT if torch.is_grad_enabled() else Pass.FORWARD)
        if reference is not None:
            self._watch(reference, lambda: Pass.REFERENCE)

    def through(self) -> None:
        """Returns when no rank has a pass left in this turn."""
        self._wait_for_turn(Pass.NONE)

    def _watch(self, model: PreTrainedModel, kind: Callable[[], Pass]) -> None:
        def before(_module: nn.Module, _inputs: Any) -> None:
            if not self._is_idle:
                self._wait_for_turn(kind())

        # Before FSDP2's own hook, which gathers parameters.
        cast(nn.Module, model).register_forward_pre_hook(before, prepend=True)

    def _wait_for_turn(self, wanted: Pass) -> None:
        while (common := self._common(wanted)) is not wanted:
            with self._idling():
                self._pass(common)

    def _common(self, wanted: Pass) -> Pass:
        """The lowest kind that some rank wants; NONE where nobody wants any."""
        wishes = torch.zeros(len(Pass), dtype=torch.int64)
        wishes[wanted] = 1
        with store_errors():
            dist.all_reduce(wishes)
        return next((kind for kind in Pass if kind is not Pass.NONE and wishes[kind] > 0), Pass.NONE)

    def _pass(self, kind: Pass) -> None:
        model = self._reference if kind is Pass.REFERENCE else self._policy
        assert model is not None
        tokens = torch.zeros((1, 2), dtype=torch.int64, device=model.device)
        with torch.set_grad_enabled(kind is Pass.GRADIENT):
            logits = model(input_ids=tokens, use_cache=False).logits
            if kind is Pass.GRADIENT:
                logits.float().sum().backward()
                for parameter in cast(nn.Module, model).parameters():
                    parameter.grad = None

    @contextmanager
    def _idling(self) -> Iterator[None]:
        self._is_idle = True
        self._mute(True)
        try:
            yield
        finally:
            self._mute(False)
            self._is_idle = False
