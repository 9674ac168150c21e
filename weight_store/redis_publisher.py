"""Whole versions in chunks through Redis: no shared folder, for models and adapters that are small."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping

from safetensors.torch import save
from torch import Tensor

from contracts.errors import BrokerFull
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest
from telemetry.crash_points import reach
from telemetry.waiting import Waiting
from weight_store.chunks import ChunkWriter, write_chunks
from weight_store.hashing import HashingThreads, on_cpu, published_dtype

FILE_NAME = "weights.safetensors"
FULL_PAUSE_S = 0.5
VERSION_NAME = re.compile(r".*/v(\d{6,})")


class RedisPublisher:
    """A WeightPublisher. A version that is published again is written over itself: equal bytes, chunk by chunk."""

    def __init__(
        self,
        folder: RunFolder,
        chunks: ChunkWriter,
        *,
        wait_s: float,
        keep_s: float,
        pause: Callable[[float], None],
    ) -> None:
        """wait_s: for room, while Redis is at maxmemory. keep_s: how long chunks outlive a trainer that is no more.

        pause: sleeps; it may raise.
        """
        self._folder = folder
        self._chunks = chunks
        self._wait_s = wait_s
        self._keep_s = keep_s
        self._pause = pause

    def publish(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> WeightManifest:
        """Raises InvalidInput for a version that is too large, DeadlineExceeded while Redis stays full."""
        tensors = on_cpu(tensors)
        with HashingThreads(tensors) as hashing:
            data = save(dict(tensors))
            waiting = Waiting(
                "room for weights in Redis, which is at maxmemory",
                deadline_s=self._wait_s,
                cure="raise maxmemory or end jobs",
            )
            while True:
                try:
                    file = write_chunks(
                        self._chunks, data, policy_version=policy_version, name=FILE_NAME, keep_s=self._keep_s
                    )
                    reach("consumer.writing_weights")
                    break
                except BrokerFull:
                    waiting.poke()
                    self._pause(FULL_PAUSE_S)
            return WeightManifest(
                policy_version=policy_version,
                weights_digest=hashing.digest(),
                dtype=published_dtype(tensors),
                transport="redis",
                directory=self._folder.relative(self._folder.weights_of(policy_version)),
                files=(file,),
            )

    def mend(self, tensors: Mapping[str, Tensor], *, policy_version: int) -> None:
        self.publish(tensors, policy_version=policy_version)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        held = [match for directory in in_use if (match := VERSION_NAME.fullmatch(directory))]
        self._chunks.drop_chunks_before(policy_version, {int(match[1]) for match in held})

    def remove_all(self) -> None:
        self._chunks.drop_chunks_before(sys.maxsize)
