"""The version that the next delta stands on, as the publisher remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from torch import Tensor

from contracts.weights import TensorDelta, WeightDelta
from weight_store.delta import MAX_ELEMENTS, advance
from weight_store.hashing import NUM_THREADS, bytes_of, dtype_name

Layout = dict[str, tuple[str, tuple[int, ...]]]


class DeltaBase:
    """A copy of one version: as much memory as the weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._layout = _layout(tensors)
        self._bytes = {name: np.array(bytes_of(tensor)) for name, tensor in tensors.items()}

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a delta can lead from this version to `tensors`."""
        return _layout(tensors) == self._layout and all(tensor.numel() <= MAX_ELEMENTS for tensor in tensors.values())

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Becomes `tensors`, which `fits`."""
        for name, tensor in tensors.items():
            self._bytes[name][:] = bytes_of(tensor)

    def advance_to(self, tensors: Mapping[str, Tensor], *, base_version: int, base_digest: str) -> WeightDelta:
        """Becomes `tensors`, which `fits`; answers what changed. base_…: of the version that this was."""

        def advanced(name: str) -> TensorDelta | None:
            tensor = tensors[name]
            new = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
            return advance(name, self._bytes[name], new, item_bytes=tensor.element_size())

        with ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="delta") as threads:
            changed = [delta for delta in threads.map(advanced, tensors) if delta is not None]
        return WeightDelta(base_version=base_version, base_digest=base_digest, tensors=tuple(changed))


def _layout(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
