"""Float32 masters and moments that wait outside the memory of the device between two steps of their group.

    home ── fetch ──▶ the device, a group of parameters at a time ── step ──▶ put ──▶ home

Home is the host's memory, or a file of the run root that ends with its process. Bytes are copied and never computed,
so that the weights are those of a job without it. On a CPU a step works in the mapped file itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch
from msgspec import UNSET
from torch import Tensor

from contracts.errors import OnbeatError
from contracts.spec.job import OptimizerSpec

log = logging.getLogger(__name__)


class Homes(Protocol):
    """Memory for the homes of an optimizer's tensors."""

    def reserve(self, num_bytes: int) -> None:
        """Takes the room of all homes. Called once, before the first of them."""
        ...

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of the host with any numbers."""
        ...

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Has tensors stay without this process's memory, where that is possible."""
        ...


class PinnedMemory:
    """Homes in page-locked memory of the host, from which a GPU copies by itself."""

    def reserve(self, num_bytes: int) -> None:
        """Takes nothing beforehand."""

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Keeps them: they are where they belong."""


class MappedFile:
    """Homes in a file without a name, which goes when this process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """folder: where the file is, on a disk with room for 12 bytes a trained parameter."""
        self._folder = folder
        self._map: mmap.mmap | None = None
        self._end = 0
        self._places: dict[int, tuple[int, int]] = {}
        """Address of a home → its place in the file, and its bytes."""

    def reserve(self, num_bytes: int) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                # The blocks are taken now: a disk that is full later would end the process by a signal.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
                else:
                    file.truncate(num_bytes)
                self._map = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise OnbeatError(
                f"no file of {num_bytes:,} bytes for the optimizer's state: {error.strerror or error}",
                field=str(self._folder),
                cure='free space there, or set optimizer.offload = "host"',
            ) from error

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._map is not None, "reserve comes first"
        num_items = torch.Size(shape).numel()
        if num_items == 0:
            return torch.empty(shape, dtype=dtype)
        home = torch.frombuffer(self._map, dtype=dtype, count=num_items, offset=self._end).view(shape)
        self._places[home.data_ptr()] = (self._end, home.nbytes)
        self._end += in_pages(home.nbytes)
        return home

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Takes the tensors' pages out of this process. Their numbers stay in the file, or in the kernel's cache."""
        if self._map is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for tensor in tensors:
            start, num_bytes = self._places.get(tensor.data_ptr(), (0, 0))
            if num_bytes:
                self._map.madvise(mmap.MADV_DONTNEED, start, in_pages(num_bytes))


def in_pages(num_bytes: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class OffloadedState:
    """The tensors of an optimizer that have a home outside the device's memory, by name.

    `make_learner` creates it where the spec has `optimizer.offload`; `PolicyOptimizer` alone uses it.
    """

    def __init__(self, homes: Homes, device: torch.device) -> None:
        self._homes = homes
        self._device = device
        self._tensors: dict[str, Tensor] = {}

    def reserve(self, num_bytes: int) -> None:
        """Takes the room of all homes, each of which has whole pages. Raises OnbeatError where there is too little."""
        self._homes.reserve(num_bytes)

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Takes a tensor's numbers home, and returns the tensor that has them there.

        The given one is needed no more: its memory is free when the caller lets go of it.
        """
        home = self._tensors.get(name)
        if home is None:
            home = self._tensors[name] = self._homes.new(tuple(tensor.shape), tensor.dtype)
        if home.data_ptr() != tensor.data_ptr():
            # From a GPU it returns when the numbers have arrived: a checkpoint may read them next.
            home.copy_(tensor)
        self._homes.release([home])
        return home

    def fetch(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the numbers of a home, where the step is computed; on a CPU the home itself."""
        return tensor.to(self._device)

    def release(self) -> None:
        """Has all homes stay without this process's memory, after they were read."""
        self._homes.release(self._tensors.values())


def offloaded_state(spec: OptimizerSpec, device: torch.device, run_root: Path) -> OffloadedState | None:
    """Returns where a job's optimizer keeps its state; None where it stays on the device.

    Args:
        spec: The job's optimizer.
        device: Where the job is trained.
        run_root: The folder of the file, for "disk".
    """
    if spec.offload is UNSET:
        return None
    if spec.offload == "disk":
        return OffloadedState(MappedFile(run_root), device)
    if device.type == "cpu":
        log.info('optimizer.offload = "host" has no effect on a CPU, whose memory is the host\'s; "disk" has one')
        return None
    return OffloadedState(PinnedMemory(), device)
