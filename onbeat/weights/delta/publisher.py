"""Deltas on the version before, in folders or an object store, and whole versions between them.

    v000010/weights-00001-of-00001.safetensors ◀─ v000011/delta-00001-of-00001.msgpack ◀─ v000012/… ◀─ manifest of 12

A manifest names the whole chain, so that a receiver needs nothing else to find its way. Large versions have several
delta files, each with some of the tensors, which are announced as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import numpy as np
import torch
from torch import Tensor

from contracts.encoding.wire import encode
from contracts.versions import TensorDelta, WeightDelta, WeightManifest, WeightStep, WeightTransport
from contracts.weights import DeltaWeights, ObjectWeights
from onbeat.base.process.crash_points import reach
from onbeat.weights.delta.codec import DELTA_NAME, DELTA_SHARD_BYTES, MAX_ELEMENTS, advance
from onbeat.weights.hashing import bytes_of
from onbeat.weights.layout import PendingVersion, layout_of, split_into_shards, total_bytes
from onbeat.weights.publication import VersionSink
from onbeat.weights.stores import VersionStore, VersionWriter
from onbeat.weights.whole import Announce, WholePublisher, WholeSink

DeltaBase = dict[str, Tensor]
"""A copy of one version, as large as the weights. It becomes the next version tensor by tensor."""
Published = Callable[[WeightManifest], None]


class DeltaPublisher(WholePublisher):
    """A WeightPublisher of deltas, and of whole versions between them.

    It holds a copy of the last version: as much memory as the weights.
    """

    def __init__(
        self,
        spec: DeltaWeights | ObjectWeights,
        store: VersionStore,
        *,
        announce: Announce,
        delta_shard_bytes: int = DELTA_SHARD_BYTES,
    ) -> None:
        """Takes the job's options and its store.

        Args:
            spec: The options of the spec's `weights`.
            store: The store, as for a WholePublisher.
            announce: Called with each shard before the version is whole.
            delta_shard_bytes: Bytes of the tensors that one delta file is about.
        """
        super().__init__(store, announce=announce)
        self._spec = spec
        self._delta_shard_bytes = delta_shard_bytes
        self._base: DeltaBase | None = None
        """None before the first version, while one is being published, and after a publication that failed."""
        self._chain: tuple[WeightStep, ...] = ()
        """The steps from a whole version to the one that `_base` holds."""
        self._needed: dict[int, frozenset[str]] = {}
        """Version → the folders that its manifest names."""

    def _sink(self, version: PendingVersion, *, is_again: bool) -> VersionSink:
        """Begins a delta, or a whole version.

        The first version of a trainer is whole, one in every so many, one that is there whole already, and one whose
        delta would not be smaller.

        Args:
            version: The version.
            is_again: True has a whole version take the delta's place; receivers look for one before they follow the
                chain.
        """
        layout = version.layout
        writer = self.store.begin(version)
        if is_again:
            return BaseSink(version, writer, base={}, announce=self._announce, published=self._repaired)
        # The base counts for nothing until the new version is published: `published` gives it back.
        base = self._base or {}
        self._base = None
        fits = layout_of(base) == dict(layout) and all(tensor.num_items <= MAX_ELEMENTS for tensor in layout.values())
        if not fits:
            # It holds nothing until each tensor was replaced.
            base = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in layout.items()}

        def published(manifest: WeightManifest) -> None:
            self._base = base
            self._chain = manifest.steps
            self._needed[version.policy_version] = frozenset(step.directory for step in manifest.steps)

        # The manifest that it was announced by before, and each later one on it, list the files of a whole version.
        if not fits or len(self._chain) >= self._spec.snapshot_every_versions or writer.holds_whole:
            return BaseSink(version, writer, base=base, announce=self._announce, published=published)
        return DeltaSink(
            version,
            writer,
            base=base,
            chain=self._chain,
            transport=cast(WeightTransport, self._spec.__struct_config__.tag),
            shard_bytes=self._delta_shard_bytes,
            announce=self._announce,
            published=published,
        )

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._needed = {version: names for version, names in self._needed.items() if version >= policy_version}
        super().remove_before(policy_version, in_use=frozenset(in_use).union(*self._needed.values()))

    def _repaired(self, manifest: WeightManifest) -> None:
        if self._chain and self._chain[-1].policy_version == manifest.policy_version:
            self._chain = manifest.steps


class BaseSink(WholeSink):
    """A VersionSink of a whole version that updates the base, so that the next version can be a delta on it."""

    def __init__(
        self,
        version: PendingVersion,
        writer: VersionWriter,
        *,
        base: DeltaBase,
        announce: Announce,
        published: Published,
    ) -> None:
        """Begins the version.

        Args:
            version: The version.
            writer: The version's place in the store.
            base: The tensors that become the new version; {} where no delta follows.
            announce: Called with each shard before the version is whole.
            published: Called with the manifest.
        """
        super().__init__(version, writer, announce=announce)
        self._base = base
        self._published = published

    def put(self, name: str, tensor: Tensor) -> None:
        if name in self._base:
            self._base[name].copy_(tensor)
        super().put(name, tensor)

    def close(self, weights_digest: str) -> WeightManifest:
        manifest = super().close(weights_digest)
        self._published(manifest)
        return manifest


class DeltaSink(BaseSink):
    """A VersionSink of the changes since `base`, which is the new version afterwards; a whole version, if that isn't
    larger.
    """

    def __init__(
        self,
        version: PendingVersion,
        writer: VersionWriter,
        *,
        base: DeltaBase,
        chain: tuple[WeightStep, ...],
        transport: WeightTransport,
        shard_bytes: int,
        announce: Announce,
        published: Published,
    ) -> None:
        """Begins the version.

        Args:
            version: The version.
            writer: The version's place in the store.
            base: The tensors of the last version; they become the new one.
            chain: The steps that lead to the version that `base` holds.
            transport: The transport in the manifest of a delta.
            shard_bytes: Bytes of the tensors that one delta file is about.
            announce: Called with each shard before the version is whole.
            published: Called with the manifest.
        """
        super().__init__(version, writer, base=base, announce=announce, published=published)
        self._chain = chain
        self._transport: WeightTransport = transport
        self._shards = [set(shard) for shard in split_into_shards(version.layout, shard_bytes=shard_bytes)]
        """Names that are missing, for each file."""
        self._shard_of = {name: number for number, shard in enumerate(self._shards) for name in shard}
        self._changed: list[list[TensorDelta]] = [[] for _ in self._shards]
        self._num_bytes = 0

    def put(self, name: str, tensor: Tensor) -> None:
        number = self._shard_of[name]
        old, new = (np.frombuffer(bytes_of(values), dtype=np.uint8) for values in (self._base[name], tensor))
        changed = advance(name, old, new, item_bytes=tensor.element_size())
        if changed is not None:
            self._changed[number].append(changed)
        self._shards[number].discard(name)
        if not self._shards[number]:
            self._write_delta(number)

    def close(self, weights_digest: str) -> WeightManifest:
        if self._num_bytes >= total_bytes(self._version.layout):
            self._writer.discard()
            # The base holds the version by now.
            for name in self._version.layout:
                super().put(name, self._base[name])
            return super().close(weights_digest)
        files = self._writer.put_in_place()
        manifest = self._version.manifest(weights_digest, transport=self._transport, files=files, base=self._chain)
        self._published(manifest)
        return manifest

    def _write_delta(self, number: int) -> None:
        last = self._chain[-1]
        changed = tuple(self._changed[number])
        self._changed[number] = []
        data = encode(WeightDelta(base_version=last.policy_version, base_digest=last.weights_digest, tensors=changed))
        name = DELTA_NAME.format(number=number + 1, count=len(self._shards))
        file = self._writer.open(name, len(data))
        file.write_at(memoryview(data), 0)
        file.close()
        reach("consumer.writing_weights")
        self._num_bytes += len(data)
        if any(self._shards):
            self._tell(name, num_bytes=len(data))
