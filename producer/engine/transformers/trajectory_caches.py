"""Keys and values of trajectories between two of their turns, within a bound.

    a row ends ─ keep, where there is room ─▶ its trajectories ─┬▶ the same row at its next turn
                                                                └▶ other weights, a pause, no further turn: gone

What is kept decides no bit: tokens after the opening's prompts go through the model by steps, whenever that is.
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
    """The first tokens of a row, with what the model keeps of them."""

    tokens: Tokens
    """[T]"""
    held: Tensor
    """[layer, 2, T, head, head dimension]"""

    def common_with(self, context: Tokens) -> Past:
        """What serves a row of these tokens: its last one is never part of it, since it has to be followed by one."""
        num = num_common(self.tokens, context)
        return Past(tokens=self.tokens[:num], held=self.held[:, :, :num])


def num_common(tokens: Tokens, context: Tokens) -> int:
    """Returns how many tokens both begin with, without the context's last one."""
    most = min(len(tokens), len(context) - 1)
    return int(np.logical_and.accumulate(tokens[:most] == context[:most]).sum())


class KeptRows:
    """What all trajectories keep together. The engine's thread calls it; trajectories may end meanwhile."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._of: WeakSet[Trajectories] = WeakSet()

    @property
    def free_bytes(self) -> int:
        return self._most_bytes - sum(past.held.nbytes for opening in self._of for past in list(opening.kept.values()))

    def keep(self, trajectories: Trajectories, row: int, past: Past) -> None:
        self._of.add(trajectories)
        trajectories.kept[row] = past

    def clear(self) -> None:
        """Forgets the rows of all trajectories."""
        for opening in self._of:
            opening.kept.clear()
