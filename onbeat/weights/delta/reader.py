"""Deltas from folders, applied to the version that the engine holds, or to the newest whole one that is at hand.

steps of the manifest:  whole 10 ◀─ delta 11 ◀─ delta 12 ◀─ delta 13
the engine holds 12 ───────────────────────────────┴─ apply 13
11 was mended, and is whole in its folder ─┴─ read it, apply 12 and 13
else ──────────────────────┴─ read 10, apply 11, 12 and 13
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from contracts.encoding.wire import decode
from contracts.errors import ContractViolation, WeightsRejected
from contracts.versions import WeightManifest, WeightStep
from contracts.weights import WeightDelta, WeightShard
from onbeat.weights.arrival import Arrival, EngineTensors, Identity, identity
from onbeat.weights.delta.codec import DELTA_PREFIX, apply
from onbeat.weights.files.reader import read_shard
from onbeat.weights.hashing import bytes_of
from onbeat.weights.version_files import below, weight_files


class DeltaReader:
    """A VersionReader."""

    def __init__(self, root: Path) -> None:
        """root: the weight root."""
        self._root = root

    def shards(self, step: WeightManifest, known: Collection[str] = ()) -> Iterator[dict[str, Tensor]]:
        raise WeightsRejected(f"version {step.policy_version} is a delta, and holds no tensors of its own")

    def fill(self, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
        done = self._go_on(manifest, engine, arrival) if arrival.files else self._follow(manifest, engine, arrival.base)
        arrival.hashing.add((name, tensor) for name, tensor in engine.tensors.items() if name not in done)

    def load_ahead(self, shard: WeightShard, engine: EngineTensors) -> None:
        """Applies a delta file. One that stands on another version than the engine's, or is in place, is left alone."""
        if not shard.name.startswith(DELTA_PREFIX):
            return
        delta = _read(below(self._root, shard.path, policy_version=shard.policy_version), engine)
        stands_on = delta.base_version, delta.base_digest
        if engine.base_of(shard.policy_version) != stands_on:
            return
        arrival = engine.arriving(shard.policy_version)
        if shard.name in arrival.files:
            # A second XOR would take the first one back.
            return
        # None while it is applied: if that fails half-way, changed elements can't be told from others.
        arrival.base = None
        _apply(delta, engine)
        arrival.base = stands_on
        arrival.took(shard, {changed.name: engine.tensors[changed.name] for changed in delta.tensors})

    def _go_on(self, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> set[str]:
        """Applies what is left of a delta; answers the tensors that were changed before, and hashed."""
        known = arrival.known(manifest.files)
        if arrival.base not in {identity(step) for step in manifest.base[-1:]} or len(known) != len(arrival.files):
            raise WeightsRejected(f"shards of another version {manifest.policy_version} were put in place")
        self._apply_step(manifest.base[-1], manifest.steps[-1], engine, known)
        return {name for names in known.values() for name in names}

    def _follow(self, manifest: WeightManifest, engine: EngineTensors, held: Identity | None) -> set[str]:
        """Starts at the newest step that is at hand, in memory or whole in its folder, and applies the deltas since."""
        steps = manifest.steps
        at = len(steps) - 1
        while not self._starts_at(steps[at], engine, held, whole_is_listed=at == 0):
            at -= 1
        for before, step in pairwise(steps[at:]):
            self._apply_step(before, step, engine)
        return set()

    def _starts_at(
        self, step: WeightStep, engine: EngineTensors, held: Identity | None, *, whole_is_listed: bool
    ) -> bool:
        """Whether the tensors hold the step now: they did already, or it was read whole."""
        if identity(step) == held:
            return True
        # Where a delta was, a whole version may have taken its place, which no manifest lists.
        folder = below(self._root, step.directory, policy_version=step.policy_version)
        whole = sorted(folder.glob("*.safetensors"))
        paths = weight_files(self._root, step) if whole_is_listed else whole
        if paths:
            engine.place_all(map(read_shard, paths), step.policy_version)
        return bool(paths)

    def _apply_step(
        self, before: WeightStep, step: WeightStep, engine: EngineTensors, known: Collection[str] = ()
    ) -> None:
        """Applies the step's files, without those that are `known`."""
        for path in weight_files(self._root, step):
            if path.name in known:
                continue
            delta = _read(path, engine)
            if (delta.base_version, delta.base_digest) != identity(before):
                raise WeightsRejected(f"{path} stands on another version {delta.base_version}")
            _apply(delta, engine)


def _read(path: Path, engine: EngineTensors) -> WeightDelta:
    # A delta lists gaps only where they are few, and what zstd can't make smaller it makes hardly larger.
    most_bytes = 2 * sum(tensor.nbytes for tensor in engine.tensors.values()) + 1024 * (len(engine.tensors) + 1024)
    try:
        if path.stat().st_size > most_bytes:
            raise WeightsRejected(f"{path} is larger than any delta of this model")
        return decode(path.read_bytes(), WeightDelta)
    except (OSError, ContractViolation) as error:
        raise WeightsRejected(f"{path} cannot be read: {error}") from error


def _apply(delta: WeightDelta, engine: EngineTensors) -> None:
    for changed in delta.tensors:
        tensor = engine.tensors.get(changed.name)
        if tensor is None:
            raise WeightsRejected(f"a delta changes {changed.name}, which the model lacks")
        raw = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
        apply(changed, raw, item_bytes=tensor.element_size())
