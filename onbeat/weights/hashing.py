"""Digests of tensors, computed by threads while something else reads or writes them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from contracts.versions import digest_of_lines, tensor_line
from onbeat.weights.layout import dtype_name

NUM_THREADS = min(4, os.cpu_count() or 1)
"""Threads of a process that hash: from a few on, memory is the bound and not the processor."""
TOGETHER_BYTES = 4 * 1024**2
"""Tensors go to a thread together until they have so many bytes: each time takes as long as to hash 100 KB."""

Named = tuple[str, Tensor]


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns raw little-endian bytes, row by row; of a contiguous CPU tensor no copy, but its own memory."""
    # Memory is taken as it is: digests, files and deltas are little-endian, and so must the machine be.
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Computes `contracts.versions.weights_digest` over tensors that are at hand."""
    return digest_of_lines(_line(name, tensor) for name, tensor in tensors.items())


class HashingThreads:
    """Hashes what is added, by threads beside the caller; a context manager.

    The tensors must not change until `digest` has returned.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(max_workers=NUM_THREADS, thread_name_prefix="hash")
        self._lines: dict[str, Future[dict[str, str]]] = {}
        """Tensor → the lines of those that were hashed with it."""

    def __enter__(self) -> HashingThreads:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, tensors: Iterable[Named]) -> None:
        """Begins to hash them; a tensor takes the place of one that was added before under its name."""
        for group in _groups(tensors):
            self.add_together(group)

    def add_together(self, tensors: list[Named]) -> Future[dict[str, str]]:
        """Begins to hash tensors in one thread. When the future is done, they may change or go."""
        # Backwards, since `_lines` pops from the end.
        lines = self._threads.submit(_lines, tensors[::-1])
        self._lines.update((name, lines) for name, _ in tensors)
        return lines

    def digest(self) -> str:
        """Waits for all that was added; answers the `weights_digest` of it."""
        return digest_of_lines(lines.result()[name] for name, lines in self._lines.items())


def _groups(tensors: Iterable[Named]) -> Iterator[list[Named]]:
    group: list[Named] = []
    for name, tensor in tensors:
        group.append((name, tensor))
        if sum(tensor.nbytes for _, tensor in group) >= TOGETHER_BYTES:
            yield group
            group = []
    if group:
        yield group


def _lines(tensors: list[Named]) -> dict[str, str]:
    """Hashes tensors in a thread; returns name → line of the digest.

    Args:
        tensors: The last one first; each is taken out, for a thread keeps its arguments longer than its result.
    """
    lines: dict[str, str] = {}
    while tensors:
        name, tensor = tensors.pop()
        lines[name] = _line(name, tensor)
    return lines


def _line(name: str, tensor: Tensor) -> str:
    return tensor_line(name, dtype_name(tensor), tuple(tensor.shape), bytes_of(tensor))
