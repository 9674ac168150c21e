"""What a rank reads of a checkpoint: its own rows of what ranks share."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.model.rows import first_row, local_rows
from weight_store.files.stored_tensors import StoredTensors


def stored_shape(stored: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Without reading the tensor, where it is in a file."""
    return stored.shape(name) if isinstance(stored, StoredTensors) else tuple(stored[name].shape)


def stored_rows(stored: Mapping[str, Tensor], name: str, *, like: Tensor | None) -> Tensor:
    """The rows that this rank has of `like`, which `name` has the shape of; all of it where `like` isn't sharded."""
    if not isinstance(like, DTensor) or not stored_shape(stored, name):
        return stored[name]
    first, count = first_row(like), local_rows(like).shape[0]
    return stored.rows(name, first, count) if isinstance(stored, StoredTensors) else stored[name][first : first + count]
