"""Deltas on the version before, in folders, and whole versions between them.

    v000010/weights-00001-of-00001.safetensors ◀─ v000011/delta-00001-of-00001.msgpack ◀─ v000012/… ◀─ manifest of 12

A manifest names the whole chain, so that a receiver needs nothing else to find its way. Large versions have several
delta files, each of some tensors, which are announced as they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from torch import Tensor

from contracts.encoding.wire import encode
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest, WeightStep
from contracts.weights import DeltaWeights, TensorDelta, WeightDelta, WeightShard
from process.crash_points import reach
from weight_store.delta.codec import DELTA_NAME, DELTA_SHARD_BYTES
from weight_store.delta.delta_base import DeltaBase
from weight_store.files.publisher import FilePublisher, FileSink
from weight_store.files.tensor_folder import ScratchFolder
from weight_store.files.version_folders import files_of, remove_versions_before, shard_of
from weight_store.layout import Layout, published_dtype, split_into_shards, total_bytes
from weight_store.publication import Publication, VersionSink


class DeltaPublisher:
    """A WeightPublisher. Holds a copy of the last version: as much memory as the weights."""

    def __init__(
        self,
        spec: DeltaWeights,
        folder: RunFolder,
        *,
        announce: Callable[[WeightShard], None],
        wait_s: float,
        shard_bytes: int = DELTA_SHARD_BYTES,
    ) -> None:
        """announce, wait_s: of `FilePublisher`. shard_bytes: of tensors that one delta file is about."""
        self._spec = spec
        self._folder = folder
        self._announce = announce
        self._wait_s = wait_s
        self._shard_bytes = shard_bytes
        self._whole = FilePublisher(folder, announce=announce, wait_s=wait_s)
        self._base: DeltaBase | None = None
        """None before the first version, while one is being published, and after a publication that failed."""
        self._chain: tuple[WeightStep, ...] = ()
        """From a whole version to the one that `_base` holds."""
        self._needed: dict[int, frozenset[str]] = {}
        """Version → the folders that its manifest names."""

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Whole is the first version of a trainer, one in every so many, and one whose delta would not be smaller.

        is_again: a whole version takes the delta's place; receivers look for one before they follow the chain.
        """
        if is_again:
            whole = self._whole.sink(layout, policy_version=policy_version)
            return Publication(layout, WholeSink(whole, published=self._mended), wait_s=self._wait_s)
        base, self._base = self._base, None
        fits = base is not None and base.fits(layout)
        base = base if base is not None and fits else DeltaBase(layout)
        sink: VersionSink = WholeSink(
            self._whole.sink(layout, policy_version=policy_version),
            published=partial(self._published, base=base),
            on_tensor=base.replace,
        )
        if fits and len(self._chain) < self._spec.snapshot_every_versions:
            sink = DeltaSink(
                layout,
                base,
                chain=self._chain,
                folder=self._folder,
                policy_version=policy_version,
                shard_bytes=self._shard_bytes,
                announce=self._announce,
                whole=lambda: self._whole.sink(layout, policy_version=policy_version),
                published=self._published,
            )
        return Publication(layout, sink, wait_s=self._wait_s)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._needed = {version: names for version, names in self._needed.items() if version >= policy_version}
        remove_versions_before(self._folder, policy_version, in_use=frozenset(in_use).union(*self._needed.values()))

    def remove_after(self, policy_version: int) -> None:
        self._whole.remove_after(policy_version)

    def clear_scratch(self) -> None:
        self._whole.clear_scratch()

    def remove_all(self) -> None:
        self._whole.remove_all()

    def _published(self, manifest: WeightManifest, base: DeltaBase) -> None:
        self._base = base
        self._chain = manifest.steps
        self._needed[manifest.policy_version] = frozenset(step.directory for step in manifest.steps)

    def _mended(self, manifest: WeightManifest) -> None:
        if self._chain and self._chain[-1].policy_version == manifest.policy_version:
            self._chain = manifest.steps


Published = Callable[[WeightManifest, DeltaBase], None]


class WholeSink:
    """A whole version, told of as it goes: what later versions stand on moves with it."""

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
    """What changed since `base`, which is the new version afterwards."""

    def __init__(
        self,
        layout: Layout,
        base: DeltaBase,
        *,
        chain: tuple[WeightStep, ...],
        folder: RunFolder,
        policy_version: int,
        shard_bytes: int,
        announce: Callable[[WeightShard], None],
        whole: Callable[[], FileSink],
        published: Published,
    ) -> None:
        """chain: up to the version that `base` holds. whole: for a version that is not smaller as a delta."""
        self._layout = layout
        self._base = base
        self._chain = chain
        self._folder = folder
        self._policy_version = policy_version
        self._announce = announce
        self._whole = whole
        self._published = published
        self._scratch = ScratchFolder(folder.weights_of(policy_version))
        self._shards = [set(shard) for shard in split_into_shards(layout, shard_bytes=shard_bytes)]
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
        if self._num_bytes >= total_bytes(self._layout):
            manifest = self._close_whole(weights_digest)
        else:
            self._scratch.put_in_place(durable=False)
            manifest = WeightManifest(
                policy_version=self._policy_version,
                weights_digest=weights_digest,
                dtype=published_dtype(self._layout),
                transport="delta",
                directory=self._folder.relative(self._scratch.target),
                files=files_of(self._scratch.target),
                base=self._chain,
            )
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
            self._announce(shard_of(self._folder, path, policy_version=self._policy_version, num_bytes=len(data)))

    def _close_whole(self, weights_digest: str) -> WeightManifest:
        """The base holds the version by now."""
        self._scratch.remove()
        whole = self._whole()
        try:
            for name in self._layout:
                whole.put(name, self._base.tensor(name))
            return whole.close(weights_digest)
        finally:
            whole.discard()
