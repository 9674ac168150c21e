"""The transports: the store that a version goes into and comes out of, and its encoding.

    spec.weights ─▶ whole or delta, adapters ─▶ STORES[transport].trainer
                                  receiver ◀─── STORES[manifest.transport].receiver

What travels differs, the digest does not. A new store is a VersionStore and a VersionFiles, a row in STORES, and a
record in contracts/weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightShard
from contracts.weights import has_deltas
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.chunks import ChunkStore, ChunkWriter, chunk_files
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderFiles
from onbeat.weights.objects.versions import ObjectFiles, ObjectVersions
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.store_sides import ChunksOf, Store, StoreNeeds
from onbeat.weights.stores import Stores
from onbeat.weights.whole import WholePublisher

NO_ACCOUNTS = StackSettings()
"""Settings of a process that reads and writes folders, and Redis, alone."""


FOLDERS = Store(trainer=StoreNeeds.folders, receiver=lambda root, *_: FolderFiles(root))
CHUNKS = Store(
    trainer=lambda needs: ChunkStore(
        needs.chunks, needs.folders(), pause=needs.pause, max_policy_lag=needs.spec.max_policy_lag
    ),
    receiver=lambda root, chunks, _: chunk_files(chunks, FolderFiles(root)),
)
OBJECTS = Store(trainer=ObjectVersions, receiver=lambda _root, _chunks, settings: ObjectFiles(settings))
"""Its client, obstore, is optional: it is imported for the first request, and an error names the extra."""
STORES: Mapping[str, Store] = {"file": FOLDERS, "delta": FOLDERS, "redis": CHUNKS, "object": OBJECTS}
"""Name in specs and manifests → store."""


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
