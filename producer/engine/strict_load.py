"""From a manifest to tensors that are exactly the model's, and the digest of what an engine was handed (I2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest, weights_digest
from producer.weight_files import check_names, weight_files


def read_strictly(
    manifest: WeightManifest, *, run_root: Path, expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The manifest's tensors on the CPU, by name: those of `expected`, no more and no less.

    `expected` may lie on the meta device: only names, shapes and dtypes count.
    Raises WeightsRejected: a missing, shortened or unreadable file, other names, another shape or dtype.
    """
    loaded: dict[str, torch.Tensor] = {}
    for path in weight_files(run_root, manifest):
        try:
            loaded.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise WeightsRejected(f"{path} cannot be read: {error}") from error
    check_names(manifest.policy_version, expected=set(expected), found=set(loaded))
    for name, wanted in expected.items():
        found = loaded[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise WeightsRejected(
                f"{name} of version {manifest.policy_version} is {_shown(found)}, the model needs {_shown(wanted)}"
            )
    return loaded


def tensors_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """`weights_digest` of tensors on the CPU, without a copy."""
    return weights_digest(_hashable(name, tensor) for name, tensor in tensors)


def _hashable(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...], memoryview]:
    """What `weights_digest` takes: name, dtype, shape and the raw bytes."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, _dtype_name(tensor), tuple(tensor.shape), data.data


def _shown(tensor: torch.Tensor) -> str:
    return f"{_dtype_name(tensor)}{list(tensor.shape)}"


def _dtype_name(tensor: torch.Tensor) -> str:
    """ "float32", as a manifest says it."""
    return str(tensor.dtype).removeprefix("torch.")
