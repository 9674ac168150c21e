"""Digests of tensors, computed by threads while something else reads or writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from contracts.versions import digest_of_lines, tensor_line, weights_digest
from weight_store.layout import dtype_name

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Of a process; a hash and a comparison are bound by memory from a few threads on."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Raw little-endian bytes, without a copy of a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """`contracts.versions.weights_digest` of the values."""
    return weights_digest(_hashable(name, tensor) for name, tensor in tensors.items())


class HashingThreads:
    """Hashes what is added, in the background; a context manager.

    The tensors must not change until `digest` has returned.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="hash")
        self._lines: dict[str, Future[str]] = {}
        self.add((tensors or {}).items())

    def __enter__(self) -> HashingThreads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces what was added before under the same names."""
        for name, tensor in tensors:
            self.add_one(name, tensor)

    def add_one(self, name: str, tensor: Tensor) -> Future[str]:
        """Its result is of no use but to wait for: the tensor may go then."""
        line = self._lines[name] = self._threads.submit(_line, name, [tensor])
        return line

    def digest(self) -> str:
        """`weights_digest` of all that was added; waits for it."""
        return digest_of_lines(line.result() for line in self._lines.values())


def _line(name: str, held: list[Tensor]) -> str:
    """held: the tensor; emptied, for a thread keeps its arguments a moment longer than its result."""
    return tensor_line(*_hashable(name, held.pop()))


def _hashable(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], memoryview]:
    return name, dtype_name(tensor), tuple(tensor.shape), bytes_of(tensor)
