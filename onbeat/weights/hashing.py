"""Digests of tensors, computed by threads while something else reads or writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from contracts.versions import digest_of_lines, tensor_line
from onbeat.weights.layout import dtype_name

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Threads of a process that hash: from a few on, memory is the bound and not the processor."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Raw little-endian bytes, row by row; of a contiguous CPU tensor no copy, but its own memory."""
    # Memory is taken as it is: digests, files and deltas are little-endian, and so must the machine be.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Computes `contracts.versions.weights_digest` over tensors that are at hand."""
    return digest_of_lines(_line(name, [tensor]) for name, tensor in tensors.items())


class HashingThreads:
    """Hashes what is added, by threads beside the caller; a context manager.

    The tensors must not change until `digest` has returned.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="hash")
        self._lines: dict[str, Future[str]] = {}

    def __enter__(self) -> HashingThreads:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Begins to hash them; a tensor takes the place of one that was added before under its name."""
        for name, tensor in tensors:
            self.add_one(name, tensor)

    def add_one(self, name: str, tensor: Tensor) -> Future[str]:
        """Begins to hash one tensor. When the future is done, the tensor may change or go."""
        line = self._lines[name] = self._threads.submit(_line, name, [tensor])
        return line

    def digest(self) -> str:
        """Waits for all that was added; answers the `weights_digest` of it."""
        return digest_of_lines(line.result() for line in self._lines.values())


def _line(name: str, held: list[Tensor]) -> str:
    """held: the tensor, alone in its list; it is taken out, for a thread keeps its arguments longer than its result."""
    tensor = held.pop()
    return tensor_line(name, dtype_name(tensor), tuple(tensor.shape), bytes_of(tensor))
