"""The element types that a version's tensors may have, in one table: a reader of bytes needs no torch for it."""

from __future__ import annotations

_ROWS = (
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
)
"""(name in a safetensors header, name in torch and in a manifest, bytes of an element)."""
TORCH_NAMES = {stored: name for stored, name, _ in _ROWS}
STORED_NAMES = {name: stored for stored, name, _ in _ROWS}
ITEM_BYTES = {name: num_bytes for _, name, num_bytes in _ROWS}
"""Bytes of an element, by the name in torch."""
