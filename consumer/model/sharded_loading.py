"""A model of which each rank reads its own rows only: no rank ever holds all of it.

    config ─▶ model without memory ─▶ `shard_model` ─▶ each rank: its rows of each tensor, out of the safetensors

transformers reads what is a DTensor by rows. It names layers to shard itself only for some architectures, so here the
parameters are sharded before it reads; the steps in between are those of its `from_pretrained`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from contracts.errors import InvalidInput


def load_sharded(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, mesh: DeviceMesh, device: torch.device
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A `LoadModel`; every rank calls it.

    Raises InvalidInput where rows of a parameter aren't rows of the files, and what transformers raises.
    """
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    conversions: Any = get_model_conversion_mapping(model)
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and not all(map(_keeps_rows, conversion.operations)):
            raise InvalidInput(
                f"the files of {type(model).__name__} aren't laid out by the rows of its parameters",
                field="trainer.sharding",
                cure='set it to "none"',
            )
    shard_model(model, mesh)
    load = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder),
        use_safetensors=True,
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=conversions,
        device_mesh=mesh,
    )
    loading, _ = type(model)._load_pretrained_model(model, None, _files(folder), load)
    loading = type(model)._finalize_model_loading(model, load, loading)
    # FSDP2 takes up the tensors that were read.
    cast(nn.Module, model).to(device)
    return model, loading.to_dict()


def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replaces each parameter by this rank's rows of it, in place. Raises InvalidInput for a model without layers."""
    layers = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in layers]
    if not found:
        raise InvalidInput(
            f"{type(model).__name__} does not name its layers", field="trainer.sharding", cure='set it to "none"'
        )
    for module in (*found, model):
        fully_shard(cast(nn.Module, module), mesh=mesh)


def _keeps_rows(operation: Any) -> bool:
    """Experts of a layer are the rows of one parameter; what else is joined must leave rows what they are."""
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim > 0


def _files(folder: Path) -> list[str]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        return [str(folder / SAFE_WEIGHTS_NAME)]
    names = set(json.loads(index.read_text())["weight_map"].values())
    return [str(folder / name) for name in sorted(names)]
