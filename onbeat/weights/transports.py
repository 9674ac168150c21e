"""The transports: how a version becomes files, a delta or chunks, and tensors again. What travels differs, the digest
does not.

    spec.weights ─▶ TRANSPORTS[…].publisher ─▶ files, a delta, chunks ─▶ TRANSPORTS[manifest.transport].reader

A new transport is a room with a publisher and a reader, one line in TRANSPORTS, its spec type in contracts/weights.py
and its name in contracts/versions.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.weights import WeightShard
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.adapter.publisher import AdapterPublisher
from onbeat.weights.arrival import VersionReader
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.delta.reader import DeltaReader
from onbeat.weights.files.publisher import FilePublisher
from onbeat.weights.files.reader import FileReader
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.redis.chunks import ChunkReader, ChunkWriter
from onbeat.weights.redis.publisher import RedisPublisher
from onbeat.weights.redis.reader import RedisReader

ChunksOf = Callable[[str], ChunkReader]


@dataclass(frozen=True, kw_only=True)
class PublisherNeeds:
    """What a publisher may need of its trainer."""

    folder: RunFolder
    wait_s: float
    """The longest that the storage may take for one tensor."""
    announce: Callable[[WeightShard], None]
    chunks: ChunkWriter
    pause: Callable[[float], None]
    max_policy_lag: int


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Both sides of one transport."""

    publisher: Callable[[Any, PublisherNeeds], WeightPublisher]
    """Takes the job's `spec.weights`, too."""
    reader: Callable[[Path, ChunksOf | None], VersionReader]
    """Takes the weight root, and job id → its chunks; None where there is no Redis."""


TRANSPORTS: Mapping[str, Transport] = {
    "file": Transport(
        publisher=lambda spec, of: FilePublisher(of.folder, announce=of.announce, wait_s=of.wait_s),
        reader=lambda root, chunks: FileReader(root),
    ),
    "delta": Transport(
        publisher=lambda spec, of: DeltaPublisher(spec, of.folder, announce=of.announce, wait_s=of.wait_s),
        reader=lambda root, chunks: DeltaReader(root),
    ),
    "redis": Transport(
        publisher=lambda spec, of: RedisPublisher(
            of.folder, of.chunks, wait_s=of.wait_s, pause=of.pause, max_policy_lag=of.max_policy_lag
        ),
        reader=lambda root, chunks: RedisReader(chunks),
    ),
}
"""Name in specs and manifests → transport."""


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
    needs = PublisherNeeds(
        folder=folder,
        wait_s=spec.timeouts.iteration_s,
        announce=announce,
        chunks=chunks,
        pause=pause,
        max_policy_lag=spec.max_policy_lag,
    )
    publisher = TRANSPORTS[str(spec.weights.__struct_config__.tag)].publisher(spec.weights, needs)
    return publisher if adapters is None else AdapterPublisher(publisher, adapters, folder, wait_s=needs.wait_s)


def make_readers(root: Path, chunks: ChunksOf | None) -> dict[str, VersionReader]:
    """Makes a reader of each transport: a generator serves whichever one a job asks for."""
    return {name: transport.reader(root, chunks) for name, transport in TRANSPORTS.items()}
