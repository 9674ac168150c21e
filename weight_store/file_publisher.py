"""Whole versions, as safetensors shards in folders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from weight_store.hashing import HashingThreads, on_cpu, published_dtype
from weight_store.tensor_folder import remove_folders
from weight_store.version_folders import SHARD_BYTES, files_of, holds, remove_versions_before, write_shards


class FilePublisher:
    """A WeightPublisher."""

    def __init__(
        self, folder: RunFolder, *, announce: Callable[[WeightShard], None], shard_bytes: int = SHARD_BYTES
    ) -> None:
        """announce: is told of each shard before the version is whole."""
        self._folder = folder
        self._announce = announce
        self._shard_bytes = shard_bytes

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightManifest:
        """A version that is there already with this digest is left as it is; one with another digest is replaced."""
        target = self._folder.weights_of(policy_version)
        tensors = on_cpu(tensors)
        with HashingThreads(tensors) as hashing:
            if not (target.is_dir() and holds(target, hashing.digest())):
                write_shards(
                    tensors,
                    folder=self._folder,
                    policy_version=policy_version,
                    shard_bytes=self._shard_bytes,
                    announce=self._announce,
                )
            return WeightManifest(
                policy_version=policy_version,
                weights_digest=hashing.digest(),
                dtype=published_dtype(tensors),
                transport="file",
                directory=self._folder.relative(target),
                files=files_of(target),
            )

    def mend(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        self.publish(tensors, policy_version=policy_version)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        remove_versions_before(self._folder, policy_version, in_use=in_use)

    def remove_all(self) -> None:
        """Only outside the run folder, where versions would take a host's memory for ever."""
        if self._folder.weight_root != self._folder.run_root and self._folder.weights.is_dir():
            remove_folders([self._folder.weights])
