"""A model of which each rank reads its own rows only: no rank ever holds all of it.

    config ─▶ model without memory ─▶ `shard_model` ─▶ each rank: its rows of each tensor, out of the safetensors

transformers reads a parameter that is a DTensor by rows. Its `from_pretrained` shards only some architectures, so here
the parameters are sharded before transformers reads. The steps are those of `from_pretrained`, by public functions of
transformers; tests/rooms/ranks/sharding/test_sharded_loading.py holds the result against what `from_pretrained` loads.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    convert_and_load_state_dict_in_model,
)
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

from contracts.errors import InvalidInput
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.model_path import FIELD, weights_index


def load_sharded(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, *, mesh: DeviceMesh, device: torch.device
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A `LoadModel`; every rank calls it.

    Raises InvalidInput where rows of a parameter aren't rows of the files, and what transformers raises.
    """
    chosen = text_model(config)
    # Shapes without memory: the whole model wouldn't fit.
    with torch.device("meta"):
        model = chosen.empty(dtype)
    conversions: Any = chosen.conversions(model)
    check_rows(model, conversions)
    check_dtypes(model)
    shard_model(model, mesh)
    loading = _read_rows(model, folder, dtype, mesh, conversions)
    model.tie_weights(missing_keys=loading.missing_keys, recompute_mapping=False)
    with chosen.towers_unreported():
        log_state_dict_report(model, str(folder), ignore_mismatched_sizes=True, loading_info=loading)
    if not loading.missing_keys and not loading.mismatched_keys:
        _compute_buffers(model)
        # FSDP2 takes up the tensors that were read.
        cast(nn.Module, model).to(device)
    return model, loading.to_dict()


def check_rows(model: PreTrainedModel, conversions: Any) -> None:
    """Raises InvalidInput where rows of a parameter aren't rows of the files.

    Args:
        model: The model; on the meta device will do.
        conversions: The transforms that lead from the files' tensors to the model's (`TextModel.conversions`).
    """
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and not all(map(_keeps_rows, conversion.operations)):
            raise InvalidInput(
                f"the files of {type(model).__name__} aren't laid out by the rows of its parameters",
                field="trainer.sharding",
                cure='set it to "none"',
            )


def check_dtypes(model: PreTrainedModel) -> None:
    """Raises InvalidInput where a layer has parameters of several dtypes: FSDP2 gathers a layer as one run of numbers.

    Args:
        model: The model; on the meta device will do.
    """
    for layer, module in sharded_layers(model).items():
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters()}
        if len(set(dtypes.values())) < 2:
            continue
        # The rare one is the exception: a router or a decay of a layer in bfloat16.
        exception = next(name for name, dtype in dtypes.items() if dtype is torch.float32)
        raise InvalidInput(
            f"{type(model).__name__} keeps {layer}.{exception} in float32, and the rest of its layer in another dtype",
            field="trainer.sharding",
            cure='set it to "none", or model.dtype = "float32"',
        )


def sharded_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the layers whose parameters are gathered together, by name; the rest of the model is one more such part.

    Raises InvalidInput for a model without layers.
    """
    layer_types = set(model._no_split_modules or ())
    named = cast(nn.Module, model).named_modules()
    layers = {name: module for name, module in named if type(module).__name__ in layer_types}
    if not layers:
        raise InvalidInput(
            f"{type(model).__name__} does not name its layers", field="trainer.sharding", cure='set it to "none"'
        )
    return layers


def shard_model(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replaces each parameter by this rank's rows of it, in place. Raises InvalidInput for a model without layers."""
    # FSDP2 wants the inner modules first.
    for module in (*sharded_layers(model).values(), model):
        fully_shard(cast(nn.Module, module), mesh=mesh)


def _read_rows(
    model: PreTrainedModel, folder: Path, dtype: torch.dtype, mesh: DeviceMesh, conversions: Any
) -> LoadStateDictInfo:
    in_float32 = ()
    if dtype is torch.bfloat16:
        in_float32 = model._keep_in_fp32_modules_strict or ()
    with contextlib.ExitStack() as opened:
        stored: dict[str, Any] = {}
        for path in _files(folder):
            file = opened.enter_context(safe_open(path, framework="pt"))
            # A slice reads nothing until it is indexed.
            stored |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        load = LoadStateDictConfig(
            dtype=dtype,
            dtype_plan=dict.fromkeys(in_float32, torch.float32),
            weight_mapping=conversions,
            device_mesh=mesh,
        )
        loading, _ = convert_and_load_state_dict_in_model(model, stored, load)
    return loading


def _compute_buffers(model: PreTrainedModel) -> None:
    """Fills the buffers that no file holds, as the frequencies of a rotary embedding; what was read stays as it is."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        module, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(module), own_name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


def _keeps_rows(operation: Any) -> bool:
    """Returns True where rows stay rows.

    Experts become rows of a joined parameter; other parameters are joined along another dimension than that of rows.
    """
    # Dimension 0 is that of rows: stacked along it, each expert stays whole.
    if isinstance(operation, MergeModulelist):
        return operation.dim == 0
    return isinstance(operation, Concatenate) and operation.dim > 0


def _files(folder: Path) -> list[str]:
    file_of = weights_index(folder, field=FIELD)
    names = [SAFE_WEIGHTS_NAME] if file_of is None else sorted(set(file_of.values()))
    return [str(folder / name) for name in names]
