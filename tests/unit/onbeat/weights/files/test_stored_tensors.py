"""A checkpoint that ranks wrote by rows reads as the tensors that they were rows of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contracts.errors import ContractViolation
from onbeat.weights.files.stored_tensors import StoredTensors

WHOLE = {"weight": torch.arange(15.0).reshape(5, 3), "bias": torch.arange(2.0), "step": torch.tensor(7.0)}


@pytest.fixture
def stored(tmp_path: Path) -> StoredTensors:
    """The files of three ranks: two rows each, as far as they go; what has no rows is rank 0's."""
    paths = [tmp_path / f"{rank}.safetensors" for rank in range(3)]
    for rank, path in enumerate(paths):
        rows = {name: WHOLE[name][2 * rank : 2 * rank + 2].clone() for name in ("weight", "bias")}
        save_file(rows if rank else rows | {"step": WHOLE["step"]}, path)
    return StoredTensors(paths)


def test_rows_of_ranks_are_read_as_the_whole_tensor(stored: StoredTensors) -> None:
    assert set(stored) == set(WHOLE)
    for name, tensor in WHOLE.items():
        assert stored.shape(name) == tuple(tensor.shape)
        assert torch.equal(stored[name], tensor)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (1, 3), (3, 2), (4, 1), (5, 0), (0, 0)])
def test_another_number_of_ranks_reads_other_rows(stored: StoredTensors, first: int, count: int) -> None:
    assert torch.equal(stored.rows("weight", first, count), WHOLE["weight"][first : first + count])
    assert stored.rows("weight", first, count).shape == (count, 3)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ContractViolation, match=r"bad\.safetensors: is damaged"):
        StoredTensors([tmp_path / "bad.safetensors"])
