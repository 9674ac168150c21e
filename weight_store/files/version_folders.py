"""The folders of the versions: what is in them, and which of them go.

    weights/v000003/weights-00001-of-00002.safetensors
    weights/v000004/delta-00001-of-00001.msgpack

Receivers verify the digest of the tensors that they loaded against the manifest (I2), so a version needs no fsync:
bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightFile
from weight_store.files.tensor_folder import remove_folders

VERSION_NAME = re.compile(r"v(\d{6,})")


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


def remove_versions_before(folder: RunFolder, policy_version: int, *, in_use: Collection[str] = ()) -> None:
    """Removes the versions below `policy_version`.

    in_use: folders, as manifests name them, that generators are reading or newer deltas stand on; they stay.
    """
    for path, version in _versions(folder):
        if version < policy_version and folder.relative(path) not in in_use:
            remove_folders([path])


def remove_versions_after(folder: RunFolder, policy_version: int) -> None:
    """Removes the versions of a future that is no more; a generator that still loads one is told so by its absence."""
    for path, version in _versions(folder):
        if version > policy_version:
            remove_folders([path])


def _versions(folder: RunFolder) -> list[tuple[Path, int]]:
    paths = folder.weights.iterdir() if folder.weights.is_dir() else ()
    return [(path, int(match[1])) for path in paths if (match := VERSION_NAME.fullmatch(path.name))]
