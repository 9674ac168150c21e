"""The rows of a tensor that a rank has, where the ranks share one model's parameters; elsewhere all of them.

FSDP2 cuts dimension 0 into as many equal parts as there are ranks, rounded up; the last ranks have fewer rows, or none.
At `store_errors`, the edge to torch.distributed, its errors become ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed import QueueEmptyError  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from contracts.errors import Unavailable, first_line
from onbeat.weights.files.stored_tensors import StoredTensors


def local_rows(tensor: Tensor) -> Tensor:
    """Returns this rank's rows of a sharded tensor, in the same memory; any other tensor as it is."""
    rows = tensor.detach()
    if isinstance(rows, DTensor):
        return rows.to_local()
    return rows


def first_row(tensor: DTensor, rank: int | None = None) -> int:
    """Returns the index of the first row that a rank has; rank: None for this one."""
    if rank is None:
        rank = tensor.device_mesh.get_local_rank()
    rows_each = -(-tensor.shape[0] // tensor.device_mesh.size())  # rounded up
    # A last rank without rows begins behind the last row.
    return min(rank * rows_each, tensor.shape[0])


def whole(rows: Tensor, like: Tensor) -> Tensor:
    """Returns all rows of a tensor that is sharded as `like`, on every rank: all ranks call it at the same time."""
    spread = spread_like(rows, like)
    if isinstance(spread, DTensor):
        return spread.full_tensor()
    return rows


def spread_like(rows: Tensor, like: Tensor) -> Tensor:
    """Returns a tensor in the memory of this rank's `rows`, spread over the ranks as `like` is.

    Where `like` isn't sharded it returns the rows themselves.
    """
    if not isinstance(like, DTensor):
        return rows
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gathered(tensor: Tensor) -> Tensor:
    """Returns all rows of a tensor, on every rank: those that share it call at the same time. Raises Unavailable."""
    with store_errors():
        return whole(local_rows(tensor), tensor)


def stored_shape(stored: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Returns the shape of a tensor; the tensor of a file is not read for it."""
    if isinstance(stored, StoredTensors):
        return stored.shape(name)
    return tuple(stored[name].shape)


def stored_rows(stored: Mapping[str, Tensor], name: str, *, like: Tensor | None) -> Tensor:
    """Returns the rows of a stored tensor that this rank has of `like`; all of them where `like` isn't sharded.

    A sharded `like` has the shape of the stored tensor, unless that is a scalar, which every rank has.
    """
    if not isinstance(like, DTensor) or not stored_shape(stored, name):
        return stored[name]
    first = first_row(like)
    count = local_rows(like).shape[0]
    if isinstance(stored, StoredTensors):
        return stored.rows(name, first, count)
    return stored[name][first : first + count]


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Raises Unavailable for torch's RuntimeError, which says that a peer or the launcher's store is gone or silent."""
    try:
        yield
    except QueueEmptyError:
        raise
    except RuntimeError as error:
        raise Unavailable(f"the trainer's ranks have lost each other: {first_line(error)}", field="ranks") from error
