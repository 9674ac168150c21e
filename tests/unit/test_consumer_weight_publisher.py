"""Published versions: complete or absent, verified by content."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from consumer.tensor_folder import tensors_digest
from consumer.weight_publisher import publish_weights, remove_versions_before, split_into_shards
from contracts.errors import OnbeatError
from contracts.run_folder import RunFolder
from contracts.versions import weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, "job")


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "layer.weight": torch.full((2, 3), value),
        "layer.bias": torch.arange(4, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }


def test_the_digest_is_that_of_the_little_endian_values() -> None:
    expected = weights_digest(
        [
            ("layer.weight", "float32", (2, 3), struct.pack("<6f", *[1.0] * 6)),
            ("layer.bias", "bfloat16", (4,), struct.pack("<4H", 0, 0x3F80, 0x4000, 0x4040)),
            ("steps", "int64", (), struct.pack("<q", 7)),
        ]
    )
    assert tensors_digest(tensors()) == expected
    transposed = {"w": torch.arange(6.0).view(2, 3).t()}
    assert tensors_digest(transposed) == tensors_digest({"w": transposed["w"].contiguous()})


def test_a_published_version_reads_back_and_its_manifest_describes_it(folder: RunFolder) -> None:
    manifest = publish_weights(tensors(), folder=folder, policy_version=3)
    directory = folder.run_root / manifest.directory
    assert manifest.directory == "job/weights/v000003"
    assert (manifest.policy_version, manifest.dtype) == (3, "float32")
    assert [file.name for file in manifest.files] == ["weights-00001-of-00001.safetensors"]
    assert manifest.files[0].num_bytes == (directory / manifest.files[0].name).stat().st_size
    assert tensors_digest(load_file(directory / manifest.files[0].name)) == manifest.weights_digest


def test_shards_keep_the_digest(folder: RunFolder) -> None:
    whole = publish_weights(tensors(), folder=folder, policy_version=0)
    sharded = publish_weights(tensors(), folder=folder, policy_version=1, shard_bytes=16)
    assert sharded.weights_digest == whole.weights_digest
    assert [file.name for file in sharded.files] == [
        "weights-00001-of-00002.safetensors",
        "weights-00002-of-00002.safetensors",
    ]
    read: dict[str, torch.Tensor] = {}
    for file in sharded.files:
        read |= load_file(folder.run_root / sharded.directory / file.name)
    assert tensors_digest(read) == whole.weights_digest
    assert [list(shard) for shard in split_into_shards(tensors(), shard_bytes=16)] == [
        ["layer.weight"],
        ["layer.bias", "steps"],
    ]


def test_publishing_again_writes_nothing_unless_the_content_differs(folder: RunFolder) -> None:
    first = publish_weights(tensors(), folder=folder, policy_version=0)
    path = folder.run_root / first.directory / first.files[0].name
    inode = path.stat().st_ino
    assert publish_weights(tensors(), folder=folder, policy_version=0) == first
    assert path.stat().st_ino == inode

    path.write_bytes(path.read_bytes()[:-4])
    assert publish_weights(tensors(), folder=folder, policy_version=0) == first
    assert tensors_digest(load_file(path)) == first.weights_digest

    changed = publish_weights(tensors(2.0), folder=folder, policy_version=0)
    assert changed.weights_digest != first.weights_digest
    assert tensors_digest(load_file(path)) == changed.weights_digest
    assert [entry.name for entry in folder.weights.iterdir()] == ["v000000"]


def test_old_versions_are_removed_and_newer_ones_stay(folder: RunFolder) -> None:
    for version in range(4):
        publish_weights(tensors(version), folder=folder, policy_version=version)
    (folder.weights / ".v000001.0123456789ab").mkdir()
    (folder.weights / ".v000004.0123456789ab").mkdir()
    remove_versions_before(folder, 2)
    assert sorted(path.name for path in folder.weights.iterdir()) == [".v000004.0123456789ab", "v000002", "v000003"]


def test_a_version_that_a_generator_reads_stays_until_it_is_loaded(folder: RunFolder) -> None:
    manifests = [publish_weights(tensors(version), folder=folder, policy_version=version) for version in range(4)]
    remove_versions_before(folder, 3, in_use={manifests[1].directory})
    assert sorted(path.name for path in folder.weights.iterdir()) == ["v000001", "v000003"]
    remove_versions_before(folder, 3)
    assert sorted(path.name for path in folder.weights.iterdir()) == ["v000003"]


def test_a_folder_that_cannot_be_written_is_named(folder: RunFolder) -> None:
    folder.path.mkdir()
    folder.weights.write_text("in the way")
    with pytest.raises(OnbeatError, match="v000000: cannot write"):
        publish_weights(tensors(), folder=folder, policy_version=0)
