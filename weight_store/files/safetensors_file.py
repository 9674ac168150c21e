"""A safetensors file whose tensors come one by one, in any order: the header goes first, each tensor to its place.

An 8-byte little-endian header length, a JSON header (name → dtype, shape, data_offsets), and the tensors' little-endian
bytes (https://github.com/huggingface/safetensors#format). Tensors of wide elements come first, so that each begins at a
multiple of its element's width.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch

from weight_store.layout import Layout

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
HEADER_ALIGNMENT = 8


class FilePlan:
    """Where everything of one file is."""

    def __init__(self, layout: Layout) -> None:
        in_order = sorted(layout.items(), key=lambda item: -item[1].dtype.itemsize)
        entries: dict[str, object] = {}
        start = 0
        for name, one in in_order:
            entries[name] = {
                "dtype": DTYPE_NAMES[one.dtype],
                "shape": list(one.shape),
                "data_offsets": [start, start + one.num_bytes],
            }
            start += one.num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        self.header = struct.pack("<Q", len(text)) + text
        self.num_bytes = len(self.header) + start
        self._starts: dict[str, int] = {}
        start = len(self.header)
        for name, one in in_order:
            self._starts[name] = start
            start += one.num_bytes

    def start_of(self, name: str) -> int:
        """Of a tensor's bytes, from the beginning of the file."""
        return self._starts[name]


class TensorFile:
    """One file that is being written; it appears with the first tensor. Raises OSError."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
        self.num_missing = len(layout)
        self._plan = FilePlan(layout)
        self._descriptor = -1

    @property
    def num_bytes(self) -> int:
        """When it is whole."""
        return self._plan.num_bytes

    def write(self, name: str, data: memoryview) -> None:
        """One tensor's bytes; the last one closes the file."""
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
        """A call writes 2 GiB at most."""
        written = 0
        while written < len(data):
            written += os.pwrite(self._descriptor, data[written:], start + written)
