"""A version by the names of a checkpoint is what transformers itself saves, tensor by tensor, for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from contracts.errors import InvalidInput
from onbeat.weights.base_model.checkpoint_names import CheckpointNames, names_of_family, names_of_folder, stored_names
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.layout import layout_of
from onbeat.weights.model_folder import empty_model, model_config, weight_tensors
from tests.families import FAMILIES, family_folder
from tests.vllm_families import FAMILIES as LARGER_FAMILIES
from tests.vllm_families import vllm_family_folder

JOINED = "model.layers.0.mlp.experts.gate_up_proj"
"""The tensor of all experts of a layer, as versions have it."""


def loaded(folder: Path) -> PreTrainedModel:
    model, _ = text_model(model_config(folder)).load(folder, torch.float32)
    return model


def version_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in weight_tensors(model)}


def saved(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Saves the model by transformers; returns the tensors of the file."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def empty(folder: Path) -> PreTrainedModel:
    return empty_model(folder, dtype=torch.float32, device="meta")


def check(names: CheckpointNames, version: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Checks both ways to a checkpoint's tensors, and the layout that is known before there are any."""
    in_order = dict(names.convert(version))
    by_name = names.converted(version)
    assert in_order.keys() == by_name.keys() == names.layout.keys() == expected.keys()
    assert names.layout == layout_of(expected)
    for name, tensor in expected.items():
        assert torch.equal(in_order[name], tensor)
        assert torch.equal(by_name[name], tensor)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_family_are_those_that_transformers_saves(tmp_path: Path, family: str) -> None:
    folder = family_folder(tmp_path, family)
    model = loaded(folder)
    version = version_of(model)
    expected = saved(model, tmp_path / "saved")
    check(names_of_folder(folder, empty(folder), layout_of(version)), version, expected)
    check(names_of_family(empty(folder), layout_of(version)), version, expected)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
@pytest.mark.parametrize("family", LARGER_FAMILIES)
def test_so_are_those_of_a_folder_whose_head_is_tied_or_which_has_a_tower(
    tmp_path: Path, family: str, tied: bool
) -> None:
    folder = vllm_family_folder(tmp_path, family, tied=tied)
    model = loaded(folder)
    version = version_of(model)
    check(names_of_folder(folder, empty(folder), layout_of(version)), version, saved(model, tmp_path / "saved"))


def test_the_text_of_a_multi_modal_folder_has_that_folder_s_names_and_those_of_its_own_class(tmp_path: Path) -> None:
    folder = vllm_family_folder(tmp_path, "qwen3_5")
    version = version_of(loaded(folder))
    norm = "model.layers.0.input_layernorm.weight"
    assert norm in version
    of_folder = names_of_folder(folder, empty(folder), layout_of(version)).layout
    assert "model.language_model.layers.0.input_layernorm.weight" in of_folder
    assert set(of_folder) < set(stored_names(folder))
    of_family = names_of_family(empty(folder), layout_of(version)).layout
    assert norm in of_family
    assert not any("language_model" in name for name in of_family)


def test_a_folder_with_the_names_of_versions_keeps_them(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "qwen3_moe")
    model = loaded(folder)
    model.save_pretrained(folder, save_original_format=False)
    version = version_of(model)
    assert JOINED in stored_names(folder)
    assert names_of_folder(folder, empty(folder), layout_of(version)).are_those_of_versions
    of_family = names_of_family(empty(folder), layout_of(version))
    assert not of_family.are_those_of_versions
    assert JOINED not in of_family.layout
    assert of_family.layout["model.layers.0.mlp.experts.3.gate_proj.weight"].shape == (16, 32)


class Watched(dict[str, Tensor]):
    """Tensors, and the names that were asked for."""

    asked: list[str]

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return super().__getitem__(name)


def test_one_conversion_is_in_memory_at_a_time(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "qwen3_moe")
    version = Watched(version_of(loaded(folder)))
    names = names_of_family(empty(folder), layout_of(dict(version)))
    version.asked = []
    tensors: Any = names.convert(version)
    name, _ = next(tensors)
    assert version.asked == [name]
    names.converted(version)
    assert version.asked == [name]
    remaining = [name for name, _ in tensors]
    assert len(remaining) > len(version)
    assert sorted(version.asked) == sorted(version)


def test_a_folder_without_weights_counts_as_one_of_the_hub_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    folder = family_folder(tmp_path, "mixtral")
    layout = layout_of(version_of(loaded(folder)))
    whole = names_of_folder(folder, empty(folder), layout).layout
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in whole
    (folder / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(InvalidInput, match=r"model\.path: .*model\.safetensors` can't be read"):
        names_of_folder(folder, empty(folder), layout)
    (folder / "model.safetensors").unlink()
    assert names_of_folder(folder, empty(folder), layout).layout == whole
