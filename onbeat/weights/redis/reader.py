"""Whole versions from chunks in Redis. They are announced when they are whole, and none of them before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from onbeat.weights.arrival import Arrival, EngineTensors
from onbeat.weights.redis.chunks import ChunkReader, read_chunks


class RedisReader:
    """A VersionReader."""

    def __init__(self, chunks: Callable[[str], ChunkReader] | None) -> None:
        """chunks: job id → its chunks; None for an engine without Redis."""
        self._chunks = chunks

    def shards(self, step: WeightManifest, known: Collection[str] = ()) -> Iterator[dict[str, Tensor]]:
        if self._chunks is None:
            raise WeightsRejected(
                f"version {step.policy_version} is in Redis, which this engine does not read",
                cure='set weights.transport = "file" or "delta"',
            )
        for file in step.files:
            data = read_chunks(self._chunks(step.job_id), file, policy_version=step.policy_version)
            try:
                yield load(data)
            except SafetensorError as error:
                raise WeightsRejected(f"version {step.policy_version} in Redis cannot be read: {error}") from error

    def fill(self, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
        engine.place_all(self.shards(manifest), manifest.policy_version, hashing=arrival.hashing)

    def load_ahead(self, shard: WeightShard, engine: EngineTensors) -> None:
        """Nothing: no chunk is announced."""
