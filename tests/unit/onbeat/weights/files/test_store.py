"""A file of a version that goes away while it is opened is a version that can't be read, and no generator's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import WeightsRejected
from onbeat.weights.files.store import read_shard
from onbeat.weights.files.tensor_folder import read_folder


@pytest.fixture
def renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is put in its place between the first and the second time that its file is opened."""
    scratch = tmp_path / ".v000001.0123456789ab"
    scratch.mkdir()
    save_file({"weight": torch.ones(3)}, scratch / "weights.safetensors")
    honest = torch.UntypedStorage.from_file

    def late(filename: str, *arguments: Any, **named: Any) -> torch.UntypedStorage:
        if scratch.exists():
            scratch.rename(tmp_path / "v000001")
        return honest(filename, *arguments, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", late)
    return scratch


def test_a_shard_that_is_renamed_while_it_is_opened_is_rejected(renamed: Path) -> None:
    with pytest.raises(WeightsRejected, match="cannot be read"):
        read_shard(renamed / "weights.safetensors")
    assert not renamed.exists()


def test_a_folder_that_is_renamed_while_it_is_opened_has_no_tensors(renamed: Path) -> None:
    assert read_folder(renamed) == {}
    assert not renamed.exists()
