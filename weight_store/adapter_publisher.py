"""Versions as adapters: their base is written once, and each version after it is some percent of the weights.

    weights/base/weights-00001-of-00003.safetensors
    weights/v000003/weights-00001-of-00001.safetensors     A and B of version 3

The digest of a version is that of the merged weights, as if they had been published.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import AdapterVersion, WeightManifest, WeightStep
from telemetry.crash_points import reach
from weight_store.adapters import AdapterSource
from weight_store.hashing import HashingThreads, on_cpu, published_dtype, tensors_digest
from weight_store.tensor_folder import remove_folders, save_tensors, write_folder
from weight_store.version_folders import SHARD_BYTES, SHARD_NAME, files_of, holds, split_into_shards

if TYPE_CHECKING:
    from weight_store.publisher import WeightPublisher

BASE_NAME = "base"


class AdapterPublisher:
    """A WeightPublisher; another one carries the matrices."""

    def __init__(self, carrier: WeightPublisher, source: AdapterSource, folder: RunFolder) -> None:
        self._carrier = carrier
        self._source = source
        self._folder = folder
        self._directory = folder.weights / BASE_NAME
        self._base: WeightStep | None = None
        """None until this trainer has seen that it is there, whole."""

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightManifest:
        """tensors: the merged weights, which are hashed and go nowhere."""
        base = self._base or self._publish_base()
        tensors = on_cpu(tensors)
        with HashingThreads(tensors) as hashing:
            matrices = self._carrier.publish(self._source.matrices(), policy_version=policy_version)
            return replace(
                matrices,
                weights_digest=hashing.digest(),
                dtype=published_dtype(tensors),
                adapter=AdapterVersion(scaling=self._source.scaling, adapter_digest=matrices.weights_digest, base=base),
            )

    def mend(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        self._carrier.mend(self._source.matrices(), policy_version=policy_version)
        self._publish_base()

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._carrier.remove_before(policy_version, in_use=in_use)

    def remove_all(self) -> None:
        """The base goes like the versions of a FilePublisher."""
        self._carrier.remove_all()
        if self._folder.weight_root != self._folder.run_root and self._directory.is_dir():
            remove_folders([self._directory])

    def _publish_base(self) -> WeightStep:
        """What is there already is read and hashed; it is written again if it is damaged."""
        tensors = on_cpu(self._source.base())
        digest = tensors_digest(tensors)
        if not holds(self._directory, digest):
            remove_folders(self._folder.weights.glob(f".{BASE_NAME}.*"))

            def fill(scratch: Path) -> None:
                shards = split_into_shards(tensors, shard_bytes=SHARD_BYTES)
                for number, shard in enumerate(shards, start=1):
                    save_tensors(shard, scratch / SHARD_NAME.format(number=number, count=len(shards)))
                    reach("consumer.writing_weights")

            write_folder(self._directory, fill, durable=False)
        self._base = WeightStep(
            policy_version=0,
            weights_digest=digest,
            directory=self._folder.relative(self._directory),
            files=files_of(self._directory),
        )
        return self._base
