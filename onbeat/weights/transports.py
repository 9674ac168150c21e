"""The transports: which store a version goes into and comes out of, and what encodes it.

    spec.weights ─▶ whole or delta, adapters ─▶ STORES[transport].trainer
                                  receiver ◀─── STORES[manifest.transport].receiver

What travels differs, the digest does not. A new store is a VersionStore and a VersionFiles, its line in STORES, its
spec type in contracts/weights.py and its name in contracts/versions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.weights import DeltaWeights, WeightShard
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderFiles, FolderStore
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.redis.chunks import ChunkReader, ChunkWriter
from onbeat.weights.redis.store import ChunkFiles, ChunkStore
from onbeat.weights.stores import VersionFiles, VersionStore
from onbeat.weights.whole import WholePublisher

ChunksOf = Callable[[str], ChunkReader]


@dataclass(frozen=True, kw_only=True)
class StoreNeeds:
    """What a store may need of its trainer."""

    folder: RunFolder
    wait_s: float
    """The longest that the storage may take for one tensor."""
    chunks: ChunkWriter
    pause: Callable[[float], None]
    max_policy_lag: int


@dataclass(frozen=True, kw_only=True)
class Store:
    """Both sides of one store."""

    trainer: Callable[[StoreNeeds], VersionStore]
    receiver: Callable[[Path, ChunksOf | None], VersionFiles]
    """Takes the weight root, and job id → its chunks; None where there is no Redis."""


FOLDERS = Store(
    trainer=lambda of: FolderStore(of.folder, wait_s=of.wait_s), receiver=lambda root, chunks: FolderFiles(root)
)
CHUNKS = Store(
    trainer=lambda of: ChunkStore(
        of.folder, of.chunks, wait_s=of.wait_s, pause=of.pause, max_policy_lag=of.max_policy_lag
    ),
    receiver=lambda root, chunks: ChunkFiles(chunks),
)
STORES: Mapping[str, Store] = {"file": FOLDERS, "delta": FOLDERS, "redis": CHUNKS}
"""Name in specs and manifests → store."""


def make_publisher(
    spec: JobSpec,
    folder: RunFolder,
    *,
    chunks: ChunkWriter,
    announce: Callable[[WeightShard], None],
    pause: Callable[[float], None],
    adapters: AdapterSource | None = None,
) -> WeightPublisher:
    """Makes the publisher that `spec.weights` names.

    announce: tells generators of a shard before its version is whole. pause: sleeps while Redis is full; it may raise.
    adapters: where the job publishes them alone; the transport carries them then.
    """
    wait_s, lag = spec.timeouts.iteration_s, spec.max_policy_lag
    needs = StoreNeeds(folder=folder, wait_s=wait_s, chunks=chunks, pause=pause, max_policy_lag=lag)
    store = STORES[str(spec.weights.__struct_config__.tag)].trainer(needs)
    publisher: WeightPublisher = WholePublisher(store, announce=announce)
    if isinstance(spec.weights, DeltaWeights):
        publisher = DeltaPublisher(spec.weights, store, announce=announce)
    return publisher if adapters is None else AdapterPublisher(publisher, adapters, folder, wait_s=wait_s)


def make_stores(root: Path, chunks: ChunksOf | None) -> dict[str, VersionFiles]:
    """Makes the receiving side of each store: a generator serves whichever one a job asks for."""
    return {name: store.receiver(root, chunks) for name, store in STORES.items()}
