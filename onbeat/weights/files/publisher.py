"""Whole versions, as safetensors shards in folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from contracts.run_folder import VERSION, RunFolder, numbered
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from onbeat.process.crash_points import reach
from onbeat.weights.files.tensor_folder import (
    ScratchFolder,
    are_same,
    files_of,
    read_folder,
    remove_folders,
    remove_scratch,
)
from onbeat.weights.hashing import bytes_of
from onbeat.weights.layout import FilePlan, Layout, PlannedVersion, planned, split_into_shards
from onbeat.weights.publication import Publication, StoredVersion, publish_all

SHARD_BYTES = 256 * 1024**2
"""Small enough that a receiver reads the first shards of a large model while the others are written."""
SHARD_NAME = "weights-{number:05d}-of-{count:05d}.safetensors"
Announce = Callable[[WeightShard], None]


class TensorFile:
    """A safetensors file whose tensors come in any order; it appears with the first one. Raises OSError."""

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


class FileSink:
    """A VersionSink: a whole version on its way into a folder, shard by shard.

    Where the folder is there already, what comes is compared with it, and nothing is written until they differ: a
    version that is published again leaves the files alone that generators may be reading.
    """

    def __init__(self, plan: PlannedVersion, root: Path, *, announce: Announce, shard_bytes: int = SHARD_BYTES) -> None:
        """announce: is told of each shard but the last one as soon as it can be read."""
        self._plan = plan
        self._root = root
        self._announce = announce
        self._scratch = ScratchFolder(root / plan.directory)
        shards = split_into_shards(plan.layout, shard_bytes=shard_bytes)
        self._files: dict[str, TensorFile] = {}
        for number, shard in enumerate(shards, start=1):
            file = TensorFile(self._scratch.path / SHARD_NAME.format(number=number, count=len(shards)), shard)
            self._files |= dict.fromkeys(shard, file)
        self._num_open = len(shards)
        self._equal: dict[str, Tensor] | None = {}
        """The tensors there that are equal to those that came; None while a version is being written."""
        self._there: dict[str, Tensor] | None = None
        """The tensors that are there; None until the first tensor comes."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Raises OnbeatError naming the folder when it cannot be written, and what `announce` raises."""
        if self._there is None:
            self._there = read_folder(self._scratch.target)
        if self._equal is not None:
            if (found := self._there.get(name)) is not None and are_same(found, tensor):
                self._equal[name] = found
                return
            self._begin_writing(self._equal)
        self._write(name, tensor)

    def close(self, weights_digest: str) -> WeightManifest:
        if self._equal is not None and (self._there or {}).keys() != self._equal.keys():
            # The folder holds more than the version.
            self._begin_writing(self._equal)
        if self._equal is None:
            self._scratch.put_in_place(durable=False)
        return self._plan.manifest(weights_digest, transport="file", files=files_of(self._scratch.target))

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
        # The last shard is not announced: the manifest, which follows at once, names it.
        if self._num_open:
            self._tell(file.path, num_bytes=file.num_bytes)

    def _tell(self, path: Path, *, num_bytes: int) -> None:
        where = path.relative_to(self._root).as_posix()
        version = self._plan.policy_version
        self._announce(WeightShard(policy_version=version, path=where, name=path.name, num_bytes=num_bytes))


class FilePublisher:
    """A WeightPublisher of whole versions."""

    def __init__(self, folder: RunFolder, *, announce: Announce, wait_s: float, shard_bytes: int = SHARD_BYTES) -> None:
        """announce: is told of each shard before the version is whole. wait_s: for the storage, for one tensor."""
        self._folder = folder
        self._announce = announce
        self._wait_s = wait_s
        self._shard_bytes = shard_bytes

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a version. One that is there already is left as it is; one with other content is replaced."""
        plan, root = planned(self._folder, layout, policy_version=policy_version), self._folder.weight_root
        sink = FileSink(plan, root, announce=self._announce, shard_bytes=self._shard_bytes)
        return Publication(layout, sink, wait_s=self._wait_s)

    def publish_stored(self, stored: StoredVersion, layout: Layout) -> WeightManifest:
        """Publishes what is stored as any version."""
        return publish_all(self, stored, layout)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        older = [path for version, path in numbered(self._folder.weights, VERSION) if version < policy_version]
        remove_folders(path for path in older if self._folder.relative(path) not in in_use)

    def remove_after(self, policy_version: int) -> None:
        """A generator that still loads a version of that future is told so by its absence."""
        remove_folders(path for version, path in numbered(self._folder.weights, VERSION) if version > policy_version)

    def clear_scratch(self) -> None:
        """Removes, in a weight root, also what jobs left that ended while they removed their versions."""
        remove_scratch(self._folder.weights)
        if self._is_elsewhere and self._folder.weight_root.is_dir():
            for job in self._folder.weight_root.iterdir():
                remove_scratch(job)

    def remove_all(self) -> None:
        """Removes versions outside the run folder alone, where they would take a host's memory for ever."""
        if self._is_elsewhere and self._folder.weights.is_dir():
            remove_folders([self._folder.weights])

    @property
    def _is_elsewhere(self) -> bool:
        return self._folder.weight_root != self._folder.run_root
