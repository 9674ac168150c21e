"""The tables of onbeat.weights hold what contracts, torch and safetensors say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contracts.versions import ITEM_BYTES, STORED_NAMES, TORCH_NAMES
from onbeat.weights.files.store import LocalFile
from onbeat.weights.hashing import bytes_of
from onbeat.weights.layout import FileLayout, layout_of
from onbeat.weights.stores import TensorFile


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_each_element_type_has_the_width_and_the_name_that_the_libraries_give_it(tmp_path: Path, name: str) -> None:
    tensor = torch.zeros(3, dtype=getattr(torch, name))
    assert tensor.element_size() == ITEM_BYTES[name]
    assert TORCH_NAMES[STORED_NAMES[name]] == name
    file = TensorFile("one", layout_of({"w": tensor}), lambda name, num_bytes: LocalFile(tmp_path / "one.safetensors"))
    file.write("w", bytes_of(tensor))
    assert load_file(tmp_path / "one.safetensors")["w"].dtype == tensor.dtype


def test_each_tensor_of_a_file_begins_at_a_multiple_of_its_element() -> None:
    tensors = {
        "bytes": torch.zeros(3, dtype=torch.uint8),
        "halves": torch.zeros(5, dtype=torch.bfloat16),
        "words": torch.zeros(1, dtype=torch.int64),
        "singles": torch.zeros(7),
    }
    version = FileLayout(layout_of(tensors))
    starts = version.starts
    assert sorted(starts, key=starts.__getitem__) == ["words", "singles", "halves", "bytes"]
    assert all(starts[name] % tensor.element_size() == 0 for name, tensor in tensors.items())
    assert version.num_bytes == starts["bytes"] + 3
