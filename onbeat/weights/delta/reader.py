"""Deltas, applied to the version that the engine holds, or to the newest whole one that is at hand.

steps of the manifest:  whole 10 ◀─ delta 11 ◀─ delta 12 ◀─ delta 13
the engine holds 12 ───────────────────────────────┴─ apply 13
11 was repaired, and is whole in its folder ─┴─ read it, apply 12 and 13
else ──────────────────────┴─ read 10, apply 11, 12 and 13
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from contracts.encoding.wire import decode
from contracts.errors import ContractViolation, WeightsRejected
from contracts.versions import WeightDelta, WeightManifest, WeightShard, WeightStep
from onbeat.weights.arrival import Arrival, EngineTensors, Identity, identity
from onbeat.weights.delta.codec import apply
from onbeat.weights.hashing import bytes_of
from onbeat.weights.stores import VersionFile, VersionFiles, announced_file, version_files


def fill_delta(files: VersionFiles, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
    """Puts a version in place as `fill_whole` does, by the deltas since one that is at hand.

    Raises WeightsRejected for what is missing, damaged, stands on another version, or is not the engine's model.
    """
    done: set[str] = set()
    if arrival.files:
        done = _go_on(files, manifest, engine, arrival)
    else:
        _follow(files, manifest, engine, arrival.base)
    arrival.hashing.add((name, tensor) for name, tensor in engine.tensors.items() if name not in done)


def take_delta_ahead(files: VersionFiles, shard: WeightShard, engine: EngineTensors) -> None:
    """Applies a delta file. One that stands on another version than the engine's, or is in place, is left alone.

    Raises WeightsRejected for one that can't be read or applied.
    """
    delta = _read(files, announced_file(shard), engine)
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


def _go_on(files: VersionFiles, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> set[str]:
    """Applies what is left of a delta; answers the tensors that were changed before, and hashed."""
    known = arrival.known(manifest.files)
    if arrival.base not in {identity(step) for step in manifest.base[-1:]} or len(known) != len(arrival.files):
        raise WeightsRejected(f"shards of another version {manifest.policy_version} were put in place")
    _apply_step(files, manifest.base[-1], manifest.steps[-1], engine, known)
    return {name for names in known.values() for name in names}


def _follow(files: VersionFiles, manifest: WeightManifest, engine: EngineTensors, in_place: Identity | None) -> None:
    """Starts at the step that is in memory, else at the newest that the store has whole; applies the deltas since."""
    steps = manifest.steps
    in_memory = [number for number, step in enumerate(steps) if identity(step) == in_place]
    at = in_memory[-1] if in_memory else len(steps) - 1
    while not in_memory and not _read_whole(files, steps[at], engine, whole_is_listed=at == 0):
        at -= 1
    for before, step in pairwise(steps[at:]):
        _apply_step(files, before, step, engine)


def _read_whole(files: VersionFiles, step: WeightStep, engine: EngineTensors, *, whole_is_listed: bool) -> bool:
    """Copies a step in, where the store has it whole.

    Args:
        files: The store's files.
        step: The step.
        engine: The tensors that are filled.
        whole_is_listed: True for the chain's first step, whose manifest lists the files of a whole version.

    Returns:
        True where the tensors hold the step now.
    """
    # Where a delta was, a whole version may have taken its place, which no manifest lists.
    whole = version_files(step) if whole_is_listed else files.whole(step)
    if whole:
        engine.place_all(map(files.tensors, whole), step.policy_version)
    return bool(whole)


def _apply_step(
    files: VersionFiles, before: WeightStep, step: WeightStep, engine: EngineTensors, known: Collection[str] = ()
) -> None:
    """Applies the step's files, without those that are `known`."""
    for file in version_files(step):
        if file.name in known:
            continue
        delta = _read(files, file, engine)
        if (delta.base_version, delta.base_digest) != identity(before):
            raise WeightsRejected(
                f"{file.name} of version {step.policy_version} stands on another version {delta.base_version}"
            )
        _apply(delta, engine)


def _read(files: VersionFiles, file: VersionFile, engine: EngineTensors) -> WeightDelta:
    # A delta lists gaps only where they are few, and what zstd can't make smaller it makes hardly larger.
    most_bytes = 2 * sum(tensor.nbytes for tensor in engine.tensors.values()) + 1024 * (len(engine.tensors) + 1024)
    try:
        return decode(files.content(file, most_bytes=most_bytes), WeightDelta)
    except ContractViolation as error:
        raise WeightsRejected(f"{file.name} of version {file.policy_version} cannot be read: {error}") from error


def _apply(delta: WeightDelta, engine: EngineTensors) -> None:
    for changed in delta.tensors:
        tensor = engine.tensors.get(changed.name)
        if tensor is None:
            raise WeightsRejected(f"a delta changes {changed.name}, which the model lacks")
        raw = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
        apply(changed, raw, item_bytes=tensor.element_size())
