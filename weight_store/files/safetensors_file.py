"""A safetensors file that is being written while its tensors come one by one, in any order."""

from __future__ import annotations

import os
from pathlib import Path

from weight_store.layout import FilePlan, Layout


class TensorFile:
    """One file on its way to disk; it appears with the first tensor. Raises OSError."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.num_missing = len(layout)
        self._plan = FilePlan(layout)
        self._descriptor = -1

    @property
    def num_bytes(self) -> int:
        """The file's bytes when it is whole."""
        return self._plan.num_bytes

    def write(self, name: str, data: memoryview) -> None:
        """Writes one tensor's bytes to their place; the last tensor closes the file."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._write_at(memoryview(self._plan.header), 0)
        self._write_at(data, self._plan.start_of(name))
        self.num_missing -= 1
        if not self.num_missing:
            self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_at(self, data: memoryview, start: int) -> None:
        written = 0
        # One call writes 2 GiB at most.
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], start + written)
