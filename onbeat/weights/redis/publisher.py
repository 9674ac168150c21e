"""Whole versions in chunks through Redis: no shared folder, for models and adapters that are small."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection

from torch import Tensor

from contracts.errors import BrokerFull
from contracts.run_folder import VERSION, RunFolder, number_of
from contracts.versions import WeightFile, WeightManifest
from onbeat.process.crash_points import reach
from onbeat.process.waiting import Waiting
from onbeat.weights.hashing import bytes_of
from onbeat.weights.layout import FilePlan, Layout, PlannedVersion, planned
from onbeat.weights.publication import Publication, StoredVersion, publish_all
from onbeat.weights.redis.chunks import ChunkedFile, ChunkWriter, most_bytes

FILE_NAME = "weights.safetensors"
FULL_PAUSE_S = 0.5


class RedisPublisher:
    """A WeightPublisher. A version that is published again is written over itself: equal bytes, chunk by chunk."""

    def __init__(
        self,
        folder: RunFolder,
        chunks: ChunkWriter,
        *,
        wait_s: float,
        pause: Callable[[float], None],
        max_policy_lag: int = 0,
    ) -> None:
        """wait_s: for room, while Redis is at maxmemory. pause: sleeps; it may raise. max_policy_lag: of the spec; so
        many versions more are held."""
        self._folder = folder
        self._chunks = chunks
        self._wait_s = wait_s
        self._keep_s = 2 * wait_s
        """How long chunks outlive a trainer that is no more."""
        self._pause = pause
        self._max_bytes = most_bytes(max_policy_lag)

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a version. Raises InvalidInput for one that is too large; its `finish` raises DeadlineExceeded while
        Redis stays full."""

        def put_chunk(number: int, data: bytes) -> None:
            waiting = Waiting(
                "room for weights in Redis, which is at maxmemory",
                deadline_s=self._wait_s,
                cure="raise maxmemory or end jobs",
            )
            while True:
                try:
                    self._chunks.put_chunk(policy_version, FILE_NAME, number, data, keep_s=self._keep_s)
                    return
                except BrokerFull:
                    waiting.poke()
                    self._pause(FULL_PAUSE_S)

        plan = planned(self._folder, layout, policy_version=policy_version)
        sink = ChunkSink(plan, put_chunk, max_bytes=self._max_bytes)
        # A chunk waits for room no longer than wait_s, and a tensor has some chunks.
        return Publication(layout, sink, wait_s=2 * self._wait_s)

    def publish_stored(self, stored: StoredVersion, layout: Layout) -> WeightManifest:
        """Publishes what is stored as any version."""
        return publish_all(self, stored, layout)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        held = [number_of(directory, VERSION) for directory in in_use]
        self._chunks.drop_chunks_before(policy_version, {version for version in held if version is not None})

    def remove_after(self, policy_version: int) -> None:
        """Nothing: each of their chunks is written over before it is announced again."""

    def clear_scratch(self) -> None:
        """Nothing: there are no folders."""

    def remove_all(self) -> None:
        self._chunks.drop_chunks_before(sys.maxsize)


class ChunkSink:
    """A VersionSink: one safetensors file in chunks."""

    def __init__(self, plan: PlannedVersion, put_chunk: Callable[[int, bytes], None], *, max_bytes: int) -> None:
        self._plan = plan
        self._places = FilePlan(plan.layout)
        self._file = ChunkedFile(self._places.num_bytes, put_chunk, max_bytes=max_bytes)
        self._has_header = False

    def put(self, name: str, tensor: Tensor) -> None:
        if not self._has_header:
            self._file.write(0, memoryview(self._places.header))
            self._has_header = True
        self._file.write(self._places.start_of(name), bytes_of(tensor))

    def close(self, weights_digest: str) -> WeightManifest:
        reach("consumer.writing_weights")
        file = WeightFile(name=FILE_NAME, num_bytes=self._places.num_bytes)
        return self._plan.manifest(weights_digest, transport="redis", files=(file,))

    def discard(self) -> None:
        """Nothing: chunks of a version that was not announced are written over, or go with the older ones."""
