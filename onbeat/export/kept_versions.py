"""The versions that a run folder still holds, as tensors: from checkpoints, whole versions, deltas, adapters.

    checkpoints/i000149/   model.safetensors, or each rank's rows; or adapters ─┐
    weights/v000150/       whole, or a delta on v000149; or adapters ───────────┼─▶ tensors of version 150
    weights/base/, or the job's model folder: what adapters stand on ───────────┘

Versions that travelled through Redis are in the checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from contracts.checkpoints import AdapterState, read_state
from contracts.errors import ContractViolation, NotFound, OnbeatError, WeightsRejected
from contracts.run_folder import CHECKPOINT, VERSION, RunFolder, numbered
from contracts.spec.job import JobSpec
from onbeat.audit.weights import ADAPTER_END, tensors_of_delta
from onbeat.weights.adapter.matrices import LayerMatrices, layers_of, merge_into
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.hashing import tensors_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class KeptVersion:
    """A folder that holds a version. `kept_versions` creates it; the export reads it."""

    policy_version: int
    weights_digest: str
    path: Path
    adapters: AdapterState | None = None
    """The adapters of a checkpoint; a published version of them says nothing of them."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A version's tensors, each read or made when it is asked for."""

    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, Tensor] = field(default_factory=dict)
    """The adapters'; {} where there are none."""


def kept_versions(folder: RunFolder, versions: Mapping[int, str] | None) -> list[KeptVersion]:
    """Lists the versions in a run folder.

    Args:
        folder: The run folder.
        versions: Version → digest by the audit chain; None where there is no chain: then only checkpoints are listed,
            which name the version that they hold.

    Returns:
        The versions, oldest first; a version's checkpoint follows its folder. A folder that the chain contradicts, or
        doesn't have, is left out.
    """
    present = [*_published(folder, versions or {}), *_checkpoints(folder)]
    if versions is not None:
        present = [entry for entry in present if versions.get(entry.policy_version) == entry.weights_digest]
    return sorted(present, key=lambda entry: (entry.policy_version, entry.path.parent == folder.checkpoints))


def read_version(version: KeptVersion, folder: RunFolder, spec: JobSpec, *, model_folder: Path) -> Weights:
    """Reads the tensors of a version.

    Args:
        version: The version.
        folder: The run folder.
        spec: The job.
        model_folder: The folder of the job's model, for the base of adapters.

    Raises:
        ContractViolation: A file is damaged.
        WeightsRejected: Adapters belong to another model.
    """
    # A checkpoint has other tensors, too, e.g. the optimizer's.
    is_checkpoint = version.path.parent == folder.checkpoints
    files = sorted(version.path.glob("model*.safetensors" if is_checkpoint else "*.safetensors"))
    if not files:
        return Weights(tensors=_of_delta(folder, version))
    stored = StoredTensors(files)
    if not any(name.endswith(ADAPTER_END) for name in stored):
        return Weights(tensors=stored)
    if version.adapters and tensors_digest(stored) != version.adapters.adapters_digest:
        raise ContractViolation("holds other adapters than it says", field=str(version.path))
    base = _base(folder, spec, model_folder, digest=version.adapters.base_digest if version.adapters else "")
    layers = layers_of(dict(stored), weights=base)
    return Weights(tensors=MergedWeights(base, layers, scaling=scaling_of(spec)), matrices=stored)


def scaling_of(spec: JobSpec) -> float:
    lora = spec.trainer.lora
    if lora is None:
        raise ContractViolation("holds adapters, which the job's spec does not have", field="trainer.lora")
    return lora.alpha / lora.rank


class MergedWeights(Mapping[str, Tensor]):
    """The merged weights of adapters and their base, made a tensor at a time."""

    def __init__(self, base: Mapping[str, Tensor], layers: Mapping[str, LayerMatrices], *, scaling: float) -> None:
        self._base = base
        self._layers = layers
        self._scaling = scaling

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name]
        layer = self._layers.get(name)
        if layer is None:
            return weight
        merged = torch.empty_like(weight)
        merge_into(merged, weight, lora_a=layer.lora_a, lora_b=layer.lora_b, scaling=self._scaling)
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def _published(folder: RunFolder, versions: Mapping[int, str]) -> Iterator[KeptVersion]:
    for version, path in numbered(folder.weights, VERSION):
        digest = versions.get(version)
        if digest:
            yield KeptVersion(policy_version=version, weights_digest=digest, path=path)


def _checkpoints(folder: RunFolder) -> Iterator[KeptVersion]:
    for _, path in numbered(folder.checkpoints, CHECKPOINT):
        try:
            says = read_state(path)
        except OnbeatError as error:
            log.warning("checkpoint %s can't be used: %s", path.name, error)
            continue
        if says.job_id == folder.job_id:
            yield KeptVersion(
                policy_version=says.policy_version,
                weights_digest=says.weights_digest,
                path=path,
                adapters=says.adapters,
            )


def _of_delta(folder: RunFolder, version: KeptVersion) -> dict[str, Tensor]:
    tensors = tensors_of_delta(folder, version.path)
    if not tensors:
        raise NotFound("the version that its delta stands on is gone", field=str(version.path))
    return {
        name: torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, data) in tensors.items()
    }


def _base(folder: RunFolder, spec: JobSpec, model_folder: Path, *, digest: str) -> Mapping[str, Tensor]:
    """Finds the base of adapters. Its digest is "" where only the merged version's is known."""
    files = sorted((folder.weights / "base").glob("*.safetensors"))
    if files:
        stored = StoredTensors(files)
        if digest in ("", tensors_digest(stored)):
            return stored
    tensors = _tensors_of_model(model_folder, dtype=getattr(torch, spec.model.dtype))
    if digest and tensors_digest(tensors) != digest:
        raise WeightsRejected(
            f"{model_folder} is not the model that the adapters were trained on",
            cure="give the folder that its relative path starts at by --model-root",
        )
    return tensors


def _tensors_of_model(folder: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns `weight_tensors` of the model in a folder, by name."""
    from transformers.utils import logging

    from onbeat.weights.base_model.text_model import text_model
    from onbeat.weights.model_folder import model_config, weight_tensors

    logging.disable_progress_bar()
    try:
        model, _ = text_model(model_config(folder)).load(folder, dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise NotFound(f"the job's model does not load: {line}", field=str(folder), cure="give --model-root") from error
    return {name: tensor.detach() for name, tensor in weight_tensors(cast(nn.Module, model))}
