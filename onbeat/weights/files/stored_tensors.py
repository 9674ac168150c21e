"""Tensors of safetensors files, read when they are asked for: whole or some rows, from one file or one of each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from contracts.errors import ContractViolation


class StoredTensors(Mapping[str, Tensor]):
    """Tensors by name in safetensors files that each hold some rows. Raises ContractViolation for files that are
    damaged.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._parts: dict[str, list[Any]] = {}
        for path in paths:
            with _damage(path):
                file = safe_open(path, framework="pt")
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    self._parts.setdefault(name, []).append((path, file.get_slice(name)))

    def __getitem__(self, name: str) -> Tensor:
        return self.rows(name, 0, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the whole tensor's shape, without reading it."""
        shapes = [part.get_shape() for _, part in self._parts[name]]
        if shapes[0]:
            return (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return ()

    def dtype(self, name: str) -> str:
        """Returns the dtype as torch names it, without `torch.`."""
        _, part = self._parts[name][0]
        return str(part[:0].dtype if part.get_shape() else part[...].dtype).removeprefix("torch.")

    def rows(self, name: str, first: int, count: int | None) -> Tensor:
        """Reads [count, …] rows from `first` on, with None all that follow; a tensor without rows is read whole."""
        if not self.shape(name):
            return self._read(name, 0, ...)
        last = self.shape(name)[0] if count is None else first + count
        pieces = []
        start = 0
        # Each file holds the rows [start, start + num_rows) of the whole tensor.
        for number, (_, part) in enumerate(self._parts[name]):
            num_rows = part.get_shape()[0]
            here = slice(max(0, first - start), max(0, min(num_rows, last - start)))
            if here.start < here.stop:
                pieces.append(self._read(name, number, here))
            start += num_rows
        return torch.cat(pieces) if pieces else self._read(name, 0, slice(0, 0))

    def _read(self, name: str, number: int, where: Any) -> Tensor:
        path, part = self._parts[name][number]
        with _damage(path):
            return part[where]


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ContractViolation(f"is damaged: {error}", field=str(path)) from error
