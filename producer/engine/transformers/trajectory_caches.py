"""Keys and values of trajectories between two of their turns, within a bound.

    a row ends ─ keep, where there is room ─▶ its trajectories ─┬▶ the same row at its next turn
                                                                └▶ other weights, a pause, no further turn: gone

What is kept decides no bit: tokens after the prompts go through the model by steps, whenever that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from producer.engine.base import Trajectories

Tokens = NDArray[np.int32]


@dataclass(frozen=True, eq=False, kw_only=True)
class Past:
    """The first tokens of a row, with the model's keys and values of them. Decoders create it; nothing changes it."""

    tokens: Tokens
    """[T]"""
    keys_and_values: Tensor
    """[layer, 2, T, head, head dimension]"""

    def common_with(self, context: Tokens) -> Past:
        """Returns the part that serves a row of these tokens. The row's last token is never part of it: a step has to
        feed it.
        """
        num = num_common(self.tokens, context)
        return Past(tokens=self.tokens[:num], keys_and_values=self.keys_and_values[:, :, :num])


def num_common(tokens: Tokens, context: Tokens) -> int:
    """Counts the tokens that both begin with, without the context's last one."""
    # The context's last token has to go through a step, which gives the logits after it.
    most = min(len(tokens), len(context) - 1)
    return int(np.logical_and.accumulate(tokens[:most] == context[:most]).sum())


class KeptRows:
    """The pasts that all trajectories keep together, within a bound. An engine creates it, and its decoders put pasts
    in.

    The engine's thread calls it; trajectories may end meanwhile, and their pasts go with them.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._of: WeakSet[Trajectories] = WeakSet()

    @property
    def free_bytes(self) -> int:
        return self._most_bytes - sum(
            past.keys_and_values.nbytes for trajectories in self._of for past in list(trajectories.pasts.values())
        )

    def keep(self, trajectories: Trajectories, row: int, past: Past) -> None:
        self._of.add(trajectories)
        trajectories.pasts[row] = past

    def clear(self) -> None:
        """Forgets the rows of all trajectories."""
        for trajectories in self._of:
            trajectories.pasts.clear()
