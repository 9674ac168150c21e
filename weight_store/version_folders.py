"""The folders of the versions: whole ones written, damaged ones found, old ones taken away.

    weights/v000003/weights-00001-of-00002.safetensors
    weights/v000004/delta.msgpack

Receivers verify the digest of the tensors that they loaded against the manifest (I2), so a version needs no fsync:
bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightFile
from contracts.weights import WeightShard
from telemetry.crash_points import reach
from weight_store.hashing import tensors_digest
from weight_store.tensor_folder import remove_folders, save_tensors, write_folder

SHARD_BYTES = 256 * 1024**2
"""Small enough that a receiver reads the first shards of a large model while the others are written."""
SHARD_NAME = "weights-{number:05d}-of-{count:05d}.safetensors"
VERSION_NAME = re.compile(r"v(\d{6,})")
SCRATCH_NAME = re.compile(r"\.v(\d{6,})\.[0-9a-f]+")


def write_shards(
    tensors: Mapping[str, Tensor],
    *,
    folder: RunFolder,
    policy_version: int,
    shard_bytes: int = SHARD_BYTES,
    announce: Callable[[WeightShard], None],
) -> None:
    """Writes a whole version, and announces each shard but the last one as soon as it can be read.

    Raises OnbeatError naming the folder when it cannot be written.
    """
    shards = split_into_shards(tensors, shard_bytes=shard_bytes)

    def fill(scratch: Path) -> None:
        for number, shard in enumerate(shards, start=1):
            path = scratch / SHARD_NAME.format(number=number, count=len(shards))
            save_tensors(shard, path)
            reach("consumer.writing_weights")
            if number < len(shards):
                num_bytes = path.stat().st_size
                announce(
                    WeightShard(
                        policy_version=policy_version,
                        path=folder.relative(path),
                        name=path.name,
                        num_bytes=num_bytes,
                    )
                )

    write_folder(folder.weights_of(policy_version), fill, durable=False)


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """As a manifest lists them."""
    return tuple(WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in sorted(directory.iterdir()))


def holds(directory: Path, digest: str) -> bool:
    """Whether the folder holds exactly this version, whole, by its content."""
    if not directory.is_dir():
        return False
    found: dict[str, Tensor] = {}
    try:
        for path in directory.iterdir():
            found.update(load_file(path))
    except (OSError, SafetensorError):
        return False
    return tensors_digest(found) == digest


def remove_versions_before(folder: RunFolder, policy_version: int, *, in_use: Collection[str] = ()) -> None:
    """Removes the versions below `policy_version`, and what a killed writer left of them.

    in_use: folders, as manifests name them, that generators are reading or newer deltas stand on; they stay.
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
