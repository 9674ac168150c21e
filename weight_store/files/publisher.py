"""Whole versions, as safetensors shards in folders."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from weight_store.files.tensor_folder import remove_folders, remove_scratch
from weight_store.files.version_folders import (
    SHARD_BYTES,
    WholeVersion,
    remove_versions_after,
    remove_versions_before,
    shard_of,
)
from weight_store.layout import Layout, published_dtype
from weight_store.publication import Publication


class FileSink:
    """A VersionSink."""

    def __init__(self, layout: Layout, whole: WholeVersion, *, directory: str, policy_version: int) -> None:
        """directory: as the manifest names it."""
        self._layout = layout
        self._whole = whole
        self._directory = directory
        self._policy_version = policy_version

    def put(self, name: str, tensor: Tensor) -> None:
        self._whole.put(name, tensor)

    def close(self, weights_digest: str) -> WeightManifest:
        return WeightManifest(
            policy_version=self._policy_version,
            weights_digest=weights_digest,
            dtype=published_dtype(self._layout),
            transport="file",
            directory=self._directory,
            files=self._whole.close(),
        )

    def discard(self) -> None:
        self._whole.discard()


class FilePublisher:
    """A WeightPublisher."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        announce: Callable[[WeightShard], None],
        wait_s: float,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """announce: is told of each shard before the version is whole. wait_s: for the storage, for one tensor."""
        self._folder = folder
        self._announce = announce
        self._wait_s = wait_s
        self._shard_bytes = shard_bytes

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """A version that is there already is left as it is; one with other content is replaced."""
        return Publication(layout, self.sink(layout, policy_version=policy_version), wait_s=self._wait_s)

    def sink(self, layout: Layout, *, policy_version: int) -> FileSink:
        target = self._folder.weights_of(policy_version)

        def on_shard(path: Path, num_bytes: int) -> None:
            self._announce(shard_of(self._folder, path, policy_version=policy_version, num_bytes=num_bytes))

        whole = WholeVersion(layout, target, shard_bytes=self._shard_bytes, on_shard=on_shard)
        return FileSink(layout, whole, directory=self._folder.relative(target), policy_version=policy_version)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        remove_versions_before(self._folder, policy_version, in_use=in_use)

    def remove_after(self, policy_version: int) -> None:
        remove_versions_after(self._folder, policy_version)

    def clear_scratch(self) -> None:
        """In a weight root also what jobs left that ended while they removed their versions."""
        remove_scratch(self._folder.weights)
        if self._is_elsewhere and self._folder.weight_root.is_dir():
            for job in self._folder.weight_root.iterdir():
                remove_scratch(job)

    def remove_all(self) -> None:
        """Only outside the run folder, where versions would take a host's memory for ever."""
        if self._is_elsewhere and self._folder.weights.is_dir():
            remove_folders([self._folder.weights])

    @property
    def _is_elsewhere(self) -> bool:
        return self._folder.weight_root != self._folder.run_root
