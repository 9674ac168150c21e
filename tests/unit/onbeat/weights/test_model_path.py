"""The files that a model's index names are files of its own folder, for every library that loads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from contracts.spec.root import SpecRoot
from onbeat.weights.model_path import WEIGHTS_INDEX, folder_of_model, weights_index


def model_with(folder: Path, index: object) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / WEIGHTS_INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    return folder / "model"


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "a/b", "", "a\n"])
def test_a_name_that_leads_out_of_a_models_folder_is_refused_by_its_field(tmp_path: Path, name: str) -> None:
    model_with(tmp_path, {"metadata": {}, "weight_map": {"lm_head.weight": name}})
    with pytest.raises(InvalidInput, match=r"index\.json. is damaged") as error:
        folder_of_model(SpecRoot(tmp_path), "model", field="model.path", cure="")
    assert error.value.field == "model.path"


@pytest.mark.parametrize("index", ["{", "[]", {}, {"weight_map": ["a"]}])
def test_a_damaged_index_is_refused(tmp_path: Path, index: object) -> None:
    folder = model_with(tmp_path, index)
    with pytest.raises(InvalidInput, match="is damaged"):
        weights_index(folder, field="model.path")


def test_an_index_says_which_file_holds_each_tensor(tmp_path: Path) -> None:
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    folder = model_with(tmp_path, {"metadata": {"total_size": 3}, "weight_map": files})
    assert weights_index(folder, field="model.path") == files
    assert folder_of_model(SpecRoot(tmp_path), "model", field="model.path", cure="") == folder
    (folder / WEIGHTS_INDEX).unlink()
    assert weights_index(folder, field="model.path") is None
