"""Deltas on the version before, in folders, and whole versions between them.

    v000010/weights-00001-of-00001.safetensors ◀─ v000011/delta.msgpack ◀─ v000012/delta.msgpack ◀─ manifest of 12

A manifest names the whole chain, so that a receiver needs nothing else to find its way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest, WeightStep
from contracts.weights import DeltaWeights, WeightShard
from contracts.wire import encode
from telemetry.crash_points import reach
from weight_store.delta import DELTA_NAME
from weight_store.delta_base import DeltaBase
from weight_store.file_publisher import FilePublisher
from weight_store.hashing import HashingThreads, on_cpu, published_dtype
from weight_store.tensor_folder import write_folder
from weight_store.version_folders import files_of, remove_versions_before


class DeltaPublisher:
    """A WeightPublisher. Holds a copy of the last version: as much memory as the weights."""

    def __init__(self, spec: DeltaWeights, folder: RunFolder, *, announce: Callable[[WeightShard], None]) -> None:
        self._spec = spec
        self._folder = folder
        self._whole = FilePublisher(folder, announce=announce)
        self._base: DeltaBase | None = None
        """None before the first version, and after a publication that failed halfway."""
        self._chain: tuple[WeightStep, ...] = ()
        """From a whole version to the one that `_base` holds."""
        self._needed: dict[int, frozenset[str]] = {}
        """Version → the folders that its manifest names."""

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightManifest:
        """Whole is the first version of a trainer, one in every so many, and one whose delta would not be smaller."""
        tensors = on_cpu(tensors)
        base, self._base = self._base, None
        manifest = None
        if base is None or not base.fits(tensors):
            base = DeltaBase(tensors)
        elif len(self._chain) < self._spec.snapshot_every_versions:
            manifest = self._publish_delta(tensors, base, policy_version=policy_version)
        else:
            base.replace(tensors)
        if manifest is None:
            manifest = self._publish_whole(tensors, policy_version=policy_version)
        self._base = base
        self._chain = manifest.steps
        self._needed[policy_version] = frozenset(step.directory for step in manifest.steps)
        return manifest

    def mend(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        """A whole version takes the delta's place: receivers look for one before they follow the chain."""
        manifest = self._publish_whole(on_cpu(tensors), policy_version=policy_version)
        if self._chain and self._chain[-1].policy_version == policy_version:
            self._chain = manifest.steps

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._needed = {version: names for version, names in self._needed.items() if version >= policy_version}
        remove_versions_before(self._folder, policy_version, in_use=frozenset(in_use).union(*self._needed.values()))

    def remove_all(self) -> None:
        self._whole.remove_all()

    def _publish_whole(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightManifest:
        return self._whole.publish(tensors, policy_version=policy_version)

    def _publish_delta(
        self, tensors: Mapping[str, Tensor], base: DeltaBase, *, policy_version: int
    ) -> WeightManifest | None:
        """None where a whole version is as small. `base` is this version afterwards, either way."""
        last = self._chain[-1]
        with HashingThreads(tensors) as hashing:
            data = encode(base.advance_to(tensors, base_version=last.policy_version, base_digest=last.weights_digest))
            if len(data) >= sum(tensor.nbytes for tensor in tensors.values()):
                return None
            target = self._folder.weights_of(policy_version)

            def fill(scratch: Path) -> None:
                (scratch / DELTA_NAME).write_bytes(data)
                reach("consumer.writing_weights")

            write_folder(target, fill, durable=False)
            return WeightManifest(
                policy_version=policy_version,
                weights_digest=hashing.digest(),
                dtype=published_dtype(tensors),
                transport="delta",
                directory=self._folder.relative(target),
                files=files_of(target),
                base=self._chain,
            )
