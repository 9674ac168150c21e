"""The folders of the versions, and what is in them.

    weights/v000003/weights-00001-of-00002.safetensors
    weights/v000004/delta-00001-of-00001.msgpack

Receivers verify the digest of the tensors that they loaded against the manifest (I2), so a version needs no fsync:
bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contracts.versions import WeightFile


def read_folder(directory: Path) -> dict[str, Tensor]:
    """Maps the tensors of a whole version, unchecked; {} where it is absent or cannot be read."""
    found: dict[str, Tensor] = {}
    try:
        for path in sorted(directory.iterdir()):
            found.update(load_file(path))
    except (OSError, SafetensorError):
        return {}
    return found


def are_same(one: Tensor, other: Tensor) -> bool:
    """Compares bit for bit: equal values may differ in their bits (0.0 and -0.0), and NaN is no value's equal."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """The folder's files as a manifest lists them."""
    return tuple(WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in sorted(directory.iterdir()))
