"""Whole versions from safetensors shards in folders, also before the last shard is written."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest, WeightStep
from contracts.weights import WeightShard
from onbeat.weights.arrival import Arrival, EngineTensors
from onbeat.weights.files.tensor_folder import UNREADABLE
from onbeat.weights.version_files import below, weight_files


class FileReader:
    """A VersionReader."""

    def __init__(self, root: Path) -> None:
        """root: the weight root."""
        self._root = root

    def shards(self, step: WeightManifest | WeightStep, known: Collection[str] = ()) -> Iterator[dict[str, Tensor]]:
        for path in weight_files(self._root, step):
            if path.name not in known:
                yield read_shard(path)

    def fill(self, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
        known = arrival.known(manifest.files)
        shards = self.shards(manifest, known)
        engine.place_all(shards, manifest.policy_version, hashing=arrival.hashing, in_place=known.values())

    def load_ahead(self, shard: WeightShard, engine: EngineTensors) -> None:
        if not shard.name.endswith(".safetensors"):
            return
        tensors = read_shard(below(self._root, shard.path, policy_version=shard.policy_version))
        engine.check(tensors, shard.policy_version)
        arrival = engine.arriving(shard.policy_version)
        # Before the first byte is overwritten: from then on no delta can start at what the tensors held.
        arrival.base = None
        engine.place(tensors, shard.policy_version)
        arrival.took(shard, {name: engine.tensors[name] for name in tensors})


def read_shard(path: Path) -> dict[str, Tensor]:
    """Maps one file's tensors, and copies none. Raises WeightsRejected where it is away or no safetensors file."""
    try:
        return load_file(path)
    except UNREADABLE as error:
        raise WeightsRejected(f"{path} cannot be read: {error}") from error
