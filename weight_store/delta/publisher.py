"""Deltas on the version before, in folders, and whole versions between them.

    v000010/weights-00001-of-00001.safetensors ◀─ v000011/delta-00001-of-00001.msgpack ◀─ v000012/… ◀─ manifest of 12

A manifest names the whole chain, so that a receiver needs nothing else to find its way. Large versions have several
delta files, each with some of the tensors, which are announced as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from contracts.encoding.wire import encode
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest, WeightStep
from contracts.weights import DeltaWeights, TensorDelta, WeightDelta
from process.crash_points import reach
from weight_store.delta.codec import DELTA_NAME, DELTA_SHARD_BYTES, MAX_ELEMENTS, advance
from weight_store.files.publisher import Announce, FilePublisher, FileSink, shard_of
from weight_store.files.tensor_folder import ScratchFolder
from weight_store.files.version_folders import files_of
from weight_store.hashing import bytes_of
from weight_store.layout import Layout, PlannedVersion, planned, split_into_shards, total_bytes
from weight_store.publication import Publication, VersionSink


class DeltaBase:
    """A copy of one version, as large as the weights. It becomes the next version tensor by tensor."""

    def __init__(self, layout: Layout) -> None:
        """The copy holds nothing until each tensor was replaced."""
        self._layout = dict(layout)
        self._tensors = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in layout.items()}

    def fits(self, layout: Layout) -> bool:
        """Whether a delta can lead from this version to one of that layout."""
        return dict(layout) == self._layout and all(one.num_items <= MAX_ELEMENTS for one in layout.values())

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def replace(self, name: str, tensor: Tensor) -> None:
        self._tensors[name].copy_(tensor)

    def advance(self, name: str, tensor: Tensor) -> TensorDelta | None:
        """Takes the new values; answers what changed, None where nothing did."""
        old, new = (np.frombuffer(bytes_of(one), dtype=np.uint8) for one in (self._tensors[name], tensor))
        return advance(name, old, new, item_bytes=tensor.element_size())


Published = Callable[[WeightManifest, DeltaBase], None]


class DeltaPublisher(FilePublisher):
    """A WeightPublisher of deltas, and of whole versions between them.

    It holds a copy of the last version: as much memory as the weights.
    """

    def __init__(
        self,
        spec: DeltaWeights,
        folder: RunFolder,
        *,
        announce: Announce,
        wait_s: float,
        shard_bytes: int = DELTA_SHARD_BYTES,
    ) -> None:
        """announce, wait_s: as for a FilePublisher. shard_bytes: bytes of the tensors that one delta file is about."""
        super().__init__(folder, announce=announce, wait_s=wait_s)
        self._spec = spec
        self._delta_shard_bytes = shard_bytes
        self._base: DeltaBase | None = None
        """None before the first version, while one is being published, and after a publication that failed."""
        self._chain: tuple[WeightStep, ...] = ()
        """The steps from a whole version to the one that `_base` holds."""
        self._needed: dict[int, frozenset[str]] = {}
        """Version → the folders that its manifest names."""

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a delta. Whole is the first version of a trainer, one in every so many, and one whose delta would not
        be smaller.

        is_again: a whole version takes the delta's place; receivers look for one before they follow the chain.
        """
        plan = planned(self._folder, layout, policy_version=policy_version)
        if is_again:
            return Publication(layout, WholeSink(self._whole(plan), published=self._mended), wait_s=self._wait_s)
        base, self._base = self._base, None
        sink: VersionSink
        if base is not None and base.fits(layout) and len(self._chain) < self._spec.snapshot_every_versions:
            sink = DeltaSink(
                plan,
                base,
                self._chain,
                root=self._folder.weight_root,
                shard_bytes=self._delta_shard_bytes,
                announce=self._announce,
                whole=self._whole,
                published=self._published,
            )
        else:
            base = base if base is not None and base.fits(layout) else DeltaBase(layout)
            published = partial(self._published, base=base)
            sink = WholeSink(self._whole(plan), published=published, on_tensor=base.replace)
        return Publication(layout, sink, wait_s=self._wait_s)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._needed = {version: names for version, names in self._needed.items() if version >= policy_version}
        super().remove_before(policy_version, in_use=frozenset(in_use).union(*self._needed.values()))

    def _published(self, manifest: WeightManifest, base: DeltaBase) -> None:
        self._base = base
        self._chain = manifest.steps
        self._needed[manifest.policy_version] = frozenset(step.directory for step in manifest.steps)

    def _mended(self, manifest: WeightManifest) -> None:
        if self._chain and self._chain[-1].policy_version == manifest.policy_version:
            self._chain = manifest.steps


class WholeSink:
    """A VersionSink: a whole version that the base follows, so that the next one can be a delta on it."""

    def __init__(
        self,
        whole: FileSink,
        *,
        published: Callable[[WeightManifest], None],
        on_tensor: Callable[[str, Tensor], None] = lambda name, tensor: None,
    ) -> None:
        self._whole = whole
        self._published = published
        self._on_tensor = on_tensor

    def put(self, name: str, tensor: Tensor) -> None:
        self._on_tensor(name, tensor)
        self._whole.put(name, tensor)

    def close(self, weights_digest: str) -> WeightManifest:
        manifest = self._whole.close(weights_digest)
        self._published(manifest)
        return manifest

    def discard(self) -> None:
        self._whole.discard()


class DeltaSink:
    """A VersionSink: what changed since `base`, which is the new version afterwards."""

    def __init__(
        self,
        plan: PlannedVersion,
        base: DeltaBase,
        chain: tuple[WeightStep, ...],
        *,
        root: Path,
        shard_bytes: int,
        announce: Announce,
        whole: Callable[[PlannedVersion], FileSink],
        published: Published,
    ) -> None:
        """chain: leads up to the version that `base` holds. whole: takes a version that is not smaller as a delta."""
        self._plan = plan
        self._base = base
        self._chain = chain
        self._root = root
        self._announce = announce
        self._whole = whole
        self._published = published
        self._scratch = ScratchFolder(root / plan.directory)
        self._shards = [set(shard) for shard in split_into_shards(plan.layout, shard_bytes=shard_bytes)]
        """Names that are missing, for each file."""
        self._shard_of = {name: number for number, shard in enumerate(self._shards) for name in shard}
        self._changed: list[list[TensorDelta]] = [[] for _ in self._shards]
        self._num_bytes = 0

    def put(self, name: str, tensor: Tensor) -> None:
        number = self._shard_of[name]
        if (changed := self._base.advance(name, tensor)) is not None:
            self._changed[number].append(changed)
        self._shards[number].discard(name)
        if not self._shards[number]:
            self._write(number)

    def close(self, weights_digest: str) -> WeightManifest:
        if self._num_bytes >= total_bytes(self._plan.layout):
            manifest = self._close_whole(weights_digest)
        else:
            self._scratch.put_in_place(durable=False)
            files = files_of(self._scratch.target)
            manifest = self._plan.manifest(weights_digest, transport="delta", files=files, base=self._chain)
        self._published(manifest, self._base)
        return manifest

    def discard(self) -> None:
        self._scratch.remove()

    def _write(self, number: int) -> None:
        last = self._chain[-1]
        changed, self._changed[number] = tuple(self._changed[number]), []
        data = encode(WeightDelta(base_version=last.policy_version, base_digest=last.weights_digest, tensors=changed))
        path = self._scratch.path / DELTA_NAME.format(number=number + 1, count=len(self._shards))
        self._scratch.create()
        with self._scratch.errors():
            path.write_bytes(data)
        reach("consumer.writing_weights")
        self._num_bytes += len(data)
        if any(self._shards):
            self._announce(shard_of(self._plan, self._root, path, num_bytes=len(data)))

    def _close_whole(self, weights_digest: str) -> WeightManifest:
        """Writes the version from the base, which holds it by now."""
        self._scratch.remove()
        whole = self._whole(self._plan)
        try:
            for name in self._plan.layout:
                whole.put(name, self._base.tensor(name))
            return whole.close(weights_digest)
        finally:
            whole.discard()
