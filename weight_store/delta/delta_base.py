"""The version that the next delta stands on, as the publisher remembers it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from contracts.weights import TensorDelta
from weight_store.delta.codec import MAX_ELEMENTS, advance
from weight_store.hashing import bytes_of
from weight_store.layout import Layout


class DeltaBase:
    """A copy of one version: as much memory as the weights. It becomes the next one tensor by tensor."""

    def __init__(self, layout: Layout) -> None:
        """Holds nothing until each tensor was replaced."""
        self._layout = dict(layout)
        self._tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in layout.items()}

    def fits(self, layout: Layout) -> bool:
        """Whether a delta can lead from this version to one of that layout."""
        return dict(layout) == self._layout and all(one.num_items <= MAX_ELEMENTS for one in layout.values())

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def replace(self, name: str, tensor: Tensor) -> None:
        self._tensors[name].copy_(tensor)

    def advance(self, name: str, tensor: Tensor) -> TensorDelta | None:
        """Takes the new values; answers what changed, None where nothing did."""
        old, new = (np.frombuffer(bytes_of(one), dtype=np.uint8) for one in (self._tensors[name], tensor))
        return advance(name, old, new, item_bytes=tensor.element_size())
