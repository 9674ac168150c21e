"""The rows of a tensor that a rank has, where the ranks share one model's parameters; elsewhere all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from consumer.rank_errors import store_errors

NO_MORE = -1


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


class GatheredTensors(Mapping[str, Tensor]):
    """On rank 0: each tensor whole, gathered when it is asked for and not kept. The other ranks are in `serve_rows`."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._places = {name: place for place, name in enumerate(self._tensors)}

    def __getitem__(self, name: str) -> Tensor:
        _say(self._places[name])
        return _gather(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Lets the other ranks go on."""
        _say(NO_MORE)


def serve_rows(tensors: Mapping[str, Tensor]) -> None:
    """On every rank but 0: gives its rows of what rank 0 asks for, until that has no more to ask."""
    in_order = list(tensors.values())
    while (place := _say(NO_MORE)) != NO_MORE:
        _gather(in_order[place])


def _say(place: int) -> int:
    """What rank 0 says."""
    said = torch.tensor([place])
    with store_errors():
        dist.broadcast(said, src=0)
    return int(said)


def _gather(tensor: Tensor) -> Tensor:
    with store_errors():
        return whole(local_rows(tensor), tensor)
