"""Digests of tensors, computed by threads while something else reads or writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from contracts.errors import OnbeatError
from contracts.versions import digest_of_lines, tensor_line, weights_digest

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Of a process; a hash and a comparison are bound by memory from a few threads on."""


def dtype_name(tensor: Tensor) -> str:
    """ "float32", as a manifest says it."""
    return str(tensor.dtype).removeprefix("torch.")


def published_dtype(tensors: Mapping[str, Tensor]) -> str:
    """Of the parameters; buffers may have others."""
    for tensor in tensors.values():
        if tensor.is_floating_point():
            return dtype_name(tensor)
    raise OnbeatError("a policy without floating-point tensors", field="weights")


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Detached and contiguous on the CPU; those that are so already are not copied."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces what was added before under the same names."""
        for name, tensor in tensors:
            self._lines[name] = self._threads.submit(_line, name, tensor)

    def digest(self) -> str:
        """`weights_digest` of all that was added; waits for it."""
        return digest_of_lines(line.result() for line in self._lines.values())


def _line(name: str, tensor: Tensor) -> str:
    return tensor_line(*_hashable(name, tensor))


def _hashable(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], memoryview]:
    return name, dtype_name(tensor), tuple(tensor.shape), bytes_of(tensor)
