"""The trainer's side: a version becomes files or chunks, and a manifest that names them.

    tensors, ─┬─▶ hashed by threads ─────────────────────────┐
    one by one └─▶ shards, a delta, or chunks in Redis ──────┴─▶ WeightManifest ─▶ announced by the trainer, and opened

What travels is up to the transport; the digest is not. `Publication` is what they have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from torch import Tensor

from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from contracts.weights import DeltaWeights, RedisWeights, WeightShard
from weight_store.adapter.matrices import AdapterSource
from weight_store.adapter.publisher import AdapterPublisher
from weight_store.delta.publisher import DeltaPublisher
from weight_store.files.publisher import FilePublisher
from weight_store.layout import Layout, layout_of
from weight_store.publication import Publication
from weight_store.redis.chunks import ChunkWriter
from weight_store.redis.publisher import RedisPublisher


class WeightPublisher(Protocol):
    """One trainer's versions. tests/unit/weight_store/test_weight_store.py runs over every implementation."""

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Takes a version's tensors from now on; finished, it makes it loadable by its manifest, complete or not at
        all. Safe to repeat.

        is_again: the version was published, and receivers refuse it: it is written again if it is damaged, so that the
        manifest it was published under holds.
        """
        ...

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        """Removes older versions, but for those that kept ones stand on.

        in_use: directories of versions that generators are loading, as manifests name them; they stay.
        """
        ...

    def remove_after(self, policy_version: int) -> None:
        """Removes the versions of a future that a rewind took back. Chunks in Redis are written over."""
        ...

    def clear_scratch(self) -> None:
        """Removes what killed publishers left, before anything is published."""
        ...

    def remove_all(self) -> None:
        """The job is over: nothing is left where nobody would look for it."""
        ...


def publish(
    publisher: WeightPublisher, tensors: Mapping[str, Tensor], *, policy_version: int, is_again: bool = False
) -> WeightManifest:
    """A version whose tensors are all there already. Raises what `begin` and `Publication.finish` raise."""
    with publisher.begin(layout_of(tensors), policy_version=policy_version, is_again=is_again) as publication:
        for name, tensor in tensors.items():
            publication.add(name, tensor)
        return publication.finish()


def make_publisher(
    spec: JobSpec,
    folder: RunFolder,
    *,
    chunks: ChunkWriter,
    announce: Callable[[WeightShard], None],
    pause: Callable[[float], None],
    adapters: AdapterSource | None = None,
) -> WeightPublisher:
    """The one that `spec.weights` names.

    announce: tells generators of a shard before its version is whole. pause: sleeps while Redis is full; it may raise.
    adapters: of a job that publishes them alone.
    """
    patience_s = spec.timeouts.iteration_s
    if adapters is not None:
        carrier = make_publisher(spec, folder, chunks=chunks, announce=announce, pause=pause)
        return AdapterPublisher(carrier, adapters, folder, wait_s=patience_s)
    match spec.weights:
        case DeltaWeights() as weights:
            return DeltaPublisher(weights, folder, announce=announce, wait_s=patience_s)
        case RedisWeights():
            return RedisPublisher(folder, chunks, wait_s=patience_s, keep_s=2 * patience_s, pause=pause)
        case _:
            return FilePublisher(folder, announce=announce, wait_s=patience_s)
