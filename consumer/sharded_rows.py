"""The rows of a tensor that a rank has, where the ranks share one model's parameters; elsewhere all of them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.rank_errors import store_errors


def local_rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, in the same memory; any other tensor as it is."""
    rows = tensor.detach()
    return rows.to_local() if isinstance(rows, DTensor) else rows


def first_row(tensor: DTensor) -> int:
    """Of the rows that this rank has."""
    rows_each = -(-tensor.shape[0] // tensor.device_mesh.size())
    return min(tensor.device_mesh.get_local_rank() * rows_each, tensor.shape[0])


def whole(rows: Tensor, like: Tensor) -> Tensor:
    """All rows of a tensor that is sharded as `like`, on every rank: all of them call it at the same time."""
    if not isinstance(like, DTensor):
        return rows
    spread = DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread.full_tensor()


def is_shared(tensor: Tensor) -> bool:
    """Whether this rank has only some rows of it."""
    return isinstance(tensor, DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """All rows of a tensor, on every rank: those that share it call this at the same time. Raises Unavailable."""
    with store_errors():
        return whole(local_rows(tensor), tensor)
