"""The transports: the store that a version goes into and comes out of, and its encoding.

    spec.weights ─▶ whole or delta, adapters ─▶ STORES[transport].trainer
                                  receiver ◀─── STORES[manifest.transport].receiver

What travels differs, the digest does not. A new store is a VersionStore, its VersionWriter and a VersionFiles, a row in
STORES, and a record in contracts/weights.py that `WeightsSpec` names, and `has_deltas` too, if it may have deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightShard
from contracts.weights import has_deltas
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.chunks import ChunkReader, ChunkStore, ChunkWriter, chunk_files
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderFiles, FolderStore
from onbeat.weights.objects.versions import ObjectFiles, ObjectVersions
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.stores import Stores, VersionFiles, VersionStore
from onbeat.weights.whole import WholePublisher

ChunksOf = Callable[[str], ChunkReader]
"""Job id → the job's versions in Redis."""
NO_ACCOUNTS = StackSettings()
"""Settings of a process that reads and writes folders, and Redis, alone."""


@dataclass(frozen=True, kw_only=True)
class StoreNeeds:
    """The parts of a trainer that a store may need; `make_publisher` fills it for each job."""

    spec: JobSpec
    """Its `weights` has the store's options; for one tensor the store may take timeouts.iteration_s."""
    folder: RunFolder
    chunks: ChunkWriter
    pause: Callable[[float], None]
    """Sleeps so many seconds while the store is full or away; it may raise."""
    settings: StackSettings
    """The process's: the address and the keys of the storage."""

    def folders(self) -> FolderStore:
        return FolderStore(self.folder, wait_s=self.spec.timeouts.iteration_s)


@dataclass(frozen=True, kw_only=True)
class Store:
    """Makes both sides of a store."""

    trainer: Callable[[StoreNeeds], VersionStore]
    receiver: Callable[[Path, ChunksOf | None, StackSettings], VersionFiles]
    """Takes the weight root, job id → its chunks (None where there is no Redis), and the process's settings."""


FOLDERS = Store(trainer=StoreNeeds.folders, receiver=lambda root, *_: FolderFiles(root))
CHUNKS = Store(
    trainer=lambda needs: ChunkStore(
        needs.chunks, needs.folders(), pause=needs.pause, max_policy_lag=needs.spec.max_policy_lag
    ),
    receiver=lambda root, chunks, _: chunk_files(chunks, FolderFiles(root)),
)
OBJECTS = Store(
    trainer=lambda needs: ObjectVersions(needs.spec, needs.folder, pause=needs.pause, settings=needs.settings),
    receiver=lambda _root, _chunks, settings: ObjectFiles(settings),
)
"""Its client, obstore, is optional: it is imported for the first request, and an error names the extra."""
STORES: Mapping[str, Store] = {"file": FOLDERS, "delta": FOLDERS, "redis": CHUNKS, "object": OBJECTS}
"""`weights.transport` of a spec or a manifest → its store. "delta" is an encoding, in the store of "file"."""


def make_publisher(
    spec: JobSpec,
    folder: RunFolder,
    *,
    chunks: ChunkWriter,
    announce: Callable[[WeightShard], None],
    pause: Callable[[float], None],
    settings: StackSettings = NO_ACCOUNTS,
    adapters: AdapterSource | None = None,
) -> WeightPublisher:
    """Makes the publisher that `spec.weights` names.

    announce: tells generators of a shard before its version is whole. pause: sleeps while Redis is full; it may raise.
    adapters: where the job publishes them alone; the transport carries them then.
    """
    needs = StoreNeeds(spec=spec, folder=folder, chunks=chunks, pause=pause, settings=settings)
    store = STORES[str(spec.weights.__struct_config__.tag)].trainer(needs)
    publisher: WeightPublisher = WholePublisher(store, announce=announce)
    if has_deltas(spec.weights):
        publisher = DeltaPublisher(spec.weights, store, announce=announce)
    return publisher if adapters is None else AdapterPublisher(publisher, adapters)


def make_stores(root: Path, chunks: ChunksOf | None = None, settings: StackSettings = NO_ACCOUNTS) -> Stores:
    """Makes the receiving side of each store: a generator serves whichever one a job asks for.

    Args:
        root: the weight root.
        chunks: job id → its versions in Redis; None where there is no Redis.
        settings: the address and the keys of the storage.

    Returns:
        Transport → receiving side. Transports with the same store share it.
    """
    receivers = {store: store.receiver(root, chunks, settings) for store in STORES.values()}
    return {name: receivers[store] for name, store in STORES.items()}
