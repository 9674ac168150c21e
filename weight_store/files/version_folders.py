"""The folders of the versions: whole ones written, damaged ones found, old ones taken away.

    weights/v000003/weights-00001-of-00002.safetensors
    weights/v000004/delta-00001-of-00001.msgpack

Receivers verify the digest of the tensors that they loaded against the manifest (I2), so a version needs no fsync:
bytes that a power cut lost are refused, and published again from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightFile
from contracts.weights import WeightShard
from process.crash_points import reach
from weight_store.files.safetensors_file import TensorFile
from weight_store.files.tensor_folder import ScratchFolder, remove_folders
from weight_store.hashing import bytes_of, tensors_digest
from weight_store.layout import Layout, split_into_shards

SHARD_BYTES = 256 * 1024**2
"""Small enough that a receiver reads the first shards of a large model while the others are written."""
SHARD_NAME = "weights-{number:05d}-of-{count:05d}.safetensors"
VERSION_NAME = re.compile(r"v(\d{6,})")


class WholeVersion:
    """A whole version on its way into a folder, shard by shard.

    Where the folder is there already, what comes is compared with it, and nothing is written until they differ: a
    version that is published again leaves the files alone that generators may be reading.
    """

    def __init__(
        self,
        layout: Layout,
        target: Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        on_shard: Callable[[Path, int], None] = lambda path, num_bytes: None,
    ) -> None:
        """on_shard: is told of each shard but the last one as soon as it can be read, with its bytes."""
        self._scratch = ScratchFolder(target)
        self._on_shard = on_shard
        shards = split_into_shards(layout, shard_bytes=shard_bytes)
        self._files: dict[str, TensorFile] = {}
        for number, shard in enumerate(shards, start=1):
            file = TensorFile(self._scratch.path / SHARD_NAME.format(number=number, count=len(shards)), shard)
            self._files |= dict.fromkeys(shard, file)
        self._num_open = len(shards)
        self._equal: dict[str, Tensor] | None = {}
        """Of what is there, the tensors that came; None while a version is being written."""
        self._there: dict[str, Tensor] | None = None
        """None until the first tensor comes."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Raises OnbeatError naming the folder when it cannot be written, and what on_shard raises."""
        if self._there is None:
            self._there = read_folder(self._scratch.target)
        if self._equal is not None:
            if (found := self._there.get(name)) is not None and are_same(found, tensor):
                self._equal[name] = found
                return
            self._begin_writing(self._equal)
        self._write(name, tensor)

    def close(self) -> tuple[WeightFile, ...]:
        """Every tensor was put: the folder is what they are, complete. Its files, as a manifest lists them."""
        if self._equal is not None and (self._there or {}).keys() != self._equal.keys():
            # The folder holds more than the version.
            self._begin_writing(self._equal)
        if self._equal is None:
            self._scratch.put_in_place(durable=False)
        return files_of(self._scratch.target)

    def discard(self) -> None:
        for file in self._files.values():
            file.close()
        self._scratch.remove()

    def _begin_writing(self, earlier: Mapping[str, Tensor]) -> None:
        self._equal = None
        self._scratch.create()
        for name, found in earlier.items():
            self._write(name, found)

    def _write(self, name: str, tensor: Tensor) -> None:
        file = self._files[name]
        with self._scratch.errors():
            file.write(name, bytes_of(tensor))
        if file.num_missing:
            return
        reach("consumer.writing_weights")
        self._num_open -= 1
        if self._num_open:
            self._on_shard(file.path, file.num_bytes)


def shard_of(folder: RunFolder, path: Path, *, policy_version: int, num_bytes: int) -> WeightShard:
    """As it is announced."""
    return WeightShard(policy_version=policy_version, path=folder.relative(path), name=path.name, num_bytes=num_bytes)


def read_folder(directory: Path) -> dict[str, Tensor]:
    """The tensors of a whole version, mapped and not checked; {} where it is absent or cannot be read."""
    found: dict[str, Tensor] = {}
    try:
        for path in sorted(directory.iterdir()):
            found.update(load_file(path))
    except (OSError, SafetensorError):
        return {}
    return found


def are_same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def files_of(directory: Path) -> tuple[WeightFile, ...]:
    """As a manifest lists them."""
    return tuple(WeightFile(name=path.name, num_bytes=path.stat().st_size) for path in sorted(directory.iterdir()))


def holds(directory: Path, digest: str) -> bool:
    """Whether the folder holds exactly this version, whole, by its content."""
    found = read_folder(directory)
    return bool(found) and tensors_digest(found) == digest


def remove_versions_before(folder: RunFolder, policy_version: int, *, in_use: Collection[str] = ()) -> None:
    """Removes the versions below `policy_version`.

    in_use: folders, as manifests name them, that generators are reading or newer deltas stand on; they stay.
    """
    if not folder.weights.is_dir():
        return
    for path in folder.weights.iterdir():
        match = VERSION_NAME.fullmatch(path.name)
        if match and int(match[1]) < policy_version and folder.relative(path) not in in_use:
            remove_folders([path])


def remove_versions_after(folder: RunFolder, policy_version: int) -> None:
    """Removes the versions of a future that is no more; a generator that still loads one is told so by its absence."""
    if folder.weights.is_dir():
        for path in folder.weights.iterdir():
            if (match := VERSION_NAME.fullmatch(path.name)) and int(match[1]) > policy_version:
                remove_folders([path])
