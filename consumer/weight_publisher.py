"""Writes a policy version for the generators to load, and takes old versions away.

    weights/v000003/weights-00001-of-00002.safetensors

Generators verify the digest of the tensors that they loaded against the manifest (I2), so a version needs no fsync:
bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from consumer.tensor_folder import remove_folders, save_tensors, tensors_digest, write_folder
from contracts.errors import OnbeatError
from contracts.run_folder import RunFolder
from contracts.versions import WeightFile, WeightManifest
from telemetry.crash_points import reach

DEFAULT_SHARD_BYTES = 2 * 1024**3
VERSION_NAME = re.compile(r"v(\d{6,})")
SCRATCH_NAME = re.compile(r"\.v(\d{6,})\.[0-9a-f]+")


def publish_weights(
    tensors: Mapping[str, Tensor],
    *,
    folder: RunFolder,
    policy_version: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> WeightManifest:
    """Writes `tensors` (`Policy.weight_tensors()`) as one version, and answers its manifest.

    A version that is there already with this digest is left as it is; one with another digest (a rewound run) is
    replaced. Raises OnbeatError naming the folder when it cannot be written.
    """
    target = folder.weights_of(policy_version)
    digest = tensors_digest(tensors)
    if not _holds(target, digest):
        shards = split_into_shards(tensors, shard_bytes=shard_bytes)

        def fill(scratch: Path) -> None:
            for number, shard in enumerate(shards, start=1):
                save_tensors(shard, scratch / f"weights-{number:05d}-of-{len(shards):05d}.safetensors")
                reach("consumer.writing_weights")

        write_folder(target, fill, durable=False)
    return WeightManifest(
        policy_version=policy_version,
        weights_digest=digest,
        dtype=_dtype_name(tensors),
        directory=folder.relative(target),
        files=tuple(WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in sorted(target.iterdir())),
    )


def remove_versions_before(folder: RunFolder, policy_version: int, *, in_use: Collection[str] = ()) -> None:
    """Removes the published versions below `policy_version`, and what a killed writer left of them.

    in_use: folders, as manifests name them, that generators are reading; they stay.
    """
    if not folder.weights.is_dir():
        return
    for path in folder.weights.iterdir():
        match = VERSION_NAME.fullmatch(path.name) or SCRATCH_NAME.fullmatch(path.name)
        if match and int(match[1]) < policy_version and folder.relative(path) not in in_use:
            remove_folders([path])


def split_into_shards(tensors: Mapping[str, Tensor], *, shard_bytes: int) -> list[dict[str, Tensor]]:
    """Tensors in order, a new shard where the next one would not fit; a larger tensor has a shard of its own."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if shards[-1] and used + tensor.nbytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    return shards


def _holds(target: Path, digest: str) -> bool:
    """Whether the folder holds exactly this version, by its content."""
    if not target.is_dir():
        return False
    found: dict[str, Tensor] = {}
    try:
        for path in target.iterdir():
            found.update(load_file(path))
    except (OSError, SafetensorError):
        return False
    return tensors_digest(found) == digest


def _dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """Of the parameters; buffers may have others."""
    for tensor in tensors.values():
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    raise OnbeatError("a policy without floating-point tensors", field="weights")
