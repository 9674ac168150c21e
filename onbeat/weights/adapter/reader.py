"""Versions as adapters: matrices that any store carries, merged into a base that is read once."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import AdapterVersion, WeightManifest, WeightStep
from onbeat.weights.adapter.matrices import layers_of, merge_into
from onbeat.weights.arrival import Arrival, EngineTensors, Identity, fill_and_check, identity
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.stores import VersionFiles, version_files
from onbeat.weights.whole import fill_whole


class AdapterReader:
    """Fills an engine with a version of adapters, by the same call as `fill_whole`.

    It keeps a copy of the base, and merges each version into that copy's weights anew. A VersionLoader creates it.
    """

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}
        """Copies of the base's weights that have adapters; the engine's own are overwritten by the merge."""
        self._base_digest = ""
        self._merged: WeakKeyDictionary[EngineTensors, Identity] = WeakKeyDictionary()
        """Memory → the version that was merged there last: while it holds that one, its tensors without adapters are
        the base's."""

    def fill(self, files: VersionFiles, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
        """Fills the engine's tensors with a version: the base, and for each layer with an adapter the merged weight."""
        adapter = manifest.adapter
        assert adapter is not None
        layers = layers_of(_matrices(files, manifest, adapter), weights=engine.tensors)
        is_merged = arrival.base is not None and arrival.base == self._merged.get(engine)
        has_base = self._base_digest == adapter.base.weights_digest and self._base.keys() == layers.keys()
        if not is_merged or not has_base:
            self._read_base(files.bases, adapter.base, engine, names=layers, dtype=manifest.dtype)
        arrival.hashing.add((name, tensor) for name, tensor in engine.tensors.items() if name not in layers)
        for name, layer in layers.items():
            target = engine.tensors[name]
            # Each version is merged into the base, never into the version before: merges don't add up.
            weight = self._base[name]
            merge_into(target, weight, lora_a=layer.lora_a, lora_b=layer.lora_b, scaling=adapter.scaling)
            arrival.hashing.add([(name, target)])
        self._merged[engine] = identity(manifest)

    def _read_base(
        self, files: VersionFiles, step: WeightStep, engine: EngineTensors, *, names: Collection[str], dtype: str
    ) -> None:
        whole = WeightManifest(
            policy_version=step.policy_version,
            weights_digest=step.weights_digest,
            dtype=dtype,
            directory=step.directory,
            files=step.files,
        )
        arrival = Arrival(policy_version=step.policy_version)
        base_digest = fill_and_check(fill_whole, files, whole, engine, arrival)
        if (self._base_digest, self._base.keys()) != (base_digest, set(names)):
            # Other memory holds merges into another base, or of other weights.
            self._merged.clear()
            self._base = {name: torch.empty_like(engine.tensors[name]) for name in names}
        self._base_digest = base_digest
        for name, base_tensor in self._base.items():
            base_tensor.copy_(engine.tensors[name])


def _matrices(files: VersionFiles, manifest: WeightManifest, adapter: AdapterVersion) -> dict[str, Tensor]:
    matrices: dict[str, Tensor] = {}
    for file in version_files(manifest):
        matrices |= files.tensors(file)
    digest = tensors_digest(matrices)
    if digest != adapter.adapter_digest:
        raise WeightsRejected(
            f"the adapters of version {manifest.policy_version} have digest {digest}, their manifest says "
            f"{adapter.adapter_digest}"
        )
    return matrices
