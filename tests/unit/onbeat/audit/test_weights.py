"""Digests that are recomputed from safetensors files without torch equal the trainer's."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from contracts.checkpoints import FORMAT_VERSION, STATE_FILE, AdapterState, CheckpointState, OlderVersion
from contracts.encoding.wire import encode_json
from contracts.errors import ContractViolation
from contracts.run_folder import RunFolder
from contracts.weights import DeltaWeights
from onbeat.audit.weights import digest_of, digest_of_rows, digests_on_disk
from onbeat.weights.delta.codec import DELTA_NAME
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderStore
from onbeat.weights.hashing import tensors_digest
from tests.publishing import publish

TENSORS = {
    "layer.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "norm": torch.tensor([1.5, -2.25], dtype=torch.bfloat16),
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "half": torch.tensor([[1.0]], dtype=torch.float16),
    "steps": torch.tensor([1, 2, 3], dtype=torch.int64),
    "mask": torch.tensor([True, False]),
    "empty": torch.zeros((0, 4)),
}


def test_every_dtype_has_the_digest_that_the_trainer_computes(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert digest_of([tmp_path / "a.safetensors"]) == tensors_digest(TENSORS)


def test_shards_have_the_digest_of_the_whole(tmp_path: Path) -> None:
    names = sorted(TENSORS)
    save_file({name: TENSORS[name] for name in names[:3]}, tmp_path / "1.safetensors")
    save_file({name: TENSORS[name] for name in names[3:]}, tmp_path / "2.safetensors")
    assert digest_of([tmp_path / "2.safetensors", tmp_path / "1.safetensors"]) == tensors_digest(TENSORS)


def test_rows_of_ranks_have_the_digest_of_the_whole(tmp_path: Path) -> None:
    paths = [tmp_path / "model-00001-of-00002.safetensors", tmp_path / "model-00002-of-00002.safetensors"]
    rows = {name: tensor for name, tensor in TENSORS.items() if tensor.dim()}
    save_file({name: t[: -(-len(t) // 2)].clone() for name, t in rows.items()} | {"scale": TENSORS["scale"]}, paths[0])
    save_file({name: t[-(-len(t) // 2) :].clone() for name, t in rows.items()}, paths[1])
    assert digest_of_rows(paths) == tensors_digest(TENSORS)


def state_of(matrices: dict[str, torch.Tensor]) -> CheckpointState:
    """State of the checkpoint after iteration 2, which holds these adapters."""
    return CheckpointState(
        format_version=FORMAT_VERSION,
        job_id="job",
        iteration=2,
        policy_version=3,
        weights_digest="ab" * 32,
        adapters=AdapterState(base_digest="00" * 32, adapters_digest=tensors_digest(matrices)),
        torch_random_state="",
        files={},
    )


def test_versions_and_checkpoints_are_found_and_unfinished_folders_are_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    for path in (folder.weights_of(3), folder.checkpoint_after(2), folder.weights / ".v000004.abc"):
        path.mkdir(parents=True)
        save_file(TENSORS, path / "model.safetensors")
    digest = tensors_digest(TENSORS)
    assert digests_on_disk(folder) == {"job/weights/v000003": (3, digest), "job/checkpoints/i000002": (3, digest)}


def test_adapters_count_where_their_checkpoint_says_what_they_make(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    matrices = {f"layer.lora_{letter}.weight": torch.ones(2, 2) for letter in "AB"}
    for path in (folder.weights_of(3), folder.checkpoint_after(2)):
        path.mkdir(parents=True)
        save_file(matrices, path / "model.safetensors")
    (path / STATE_FILE).write_bytes(encode_json(state_of(matrices)))
    assert digests_on_disk(folder) == {"job/checkpoints/i000002": (3, "ab" * 32)}
    others = AdapterState(base_digest="00" * 32, adapters_digest="cd" * 32)
    for damaged, problem in (
        (replace(state_of(matrices), adapters=others), "other adapters than it says"),
        (replace(state_of(matrices), adapters=None), "names no adapters"),
        (replace(state_of(matrices), format_version=FORMAT_VERSION + 1), f"has format {FORMAT_VERSION + 1}"),
        (replace(state_of(matrices), iteration=3), "against its folder's name"),
    ):
        (path / STATE_FILE).write_bytes(encode_json(damaged))
        with pytest.raises(ContractViolation, match=problem):
            digests_on_disk(folder)


def test_a_state_that_is_a_pipe_or_a_link_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    path = folder.checkpoint_after(2)
    path.mkdir(parents=True)
    save_file({f"layer.lora_{letter}.weight": torch.ones(2, 2) for letter in "AB"}, path / "model.safetensors")
    for make in (lambda: os.mkfifo(path / STATE_FILE), lambda: (path / STATE_FILE).symlink_to("/dev/zero")):
        make()
        with pytest.raises(ContractViolation, match="is no plain file"):
            digests_on_disk(folder)
        (path / STATE_FILE).unlink()


def test_the_older_versions_of_a_checkpoint_are_hashed_each_by_itself(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    path = folder.checkpoint_after(2)
    path.mkdir(parents=True)
    older = TENSORS | {"norm": torch.tensor([1.5, -2.5], dtype=torch.bfloat16)}
    save_file(TENSORS, path / "model.safetensors")
    save_file(older, path / "older-v000002.safetensors")
    assert digests_on_disk(folder) == {
        "job/checkpoints/i000002": (3, tensors_digest(TENSORS)),
        "job/checkpoints/i000002/older-v000002.safetensors": (2, tensors_digest(older)),
    }
    (path / "older-v000002.safetensors").write_bytes(b"cut")
    with pytest.raises(ContractViolation, match="older-v000002"):
        digests_on_disk(folder)


def test_older_adapters_count_as_what_their_checkpoint_says_that_they_make(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    path = folder.checkpoint_after(2)
    path.mkdir(parents=True)
    matrices = {f"layer.lora_{letter}.weight": torch.ones(2, 2) for letter in "AB"}
    older = {name: 2.0 * matrix for name, matrix in matrices.items()}
    save_file(matrices, path / "model.safetensors")
    save_file(older, path / "older-v000002.safetensors")
    says = OlderVersion(
        policy_version=2,
        weights_digest="cd" * 32,
        tensors_digest=tensors_digest(older),
        file="older-v000002.safetensors",
    )
    state = replace(state_of(matrices), older=(says,))
    (path / STATE_FILE).write_bytes(encode_json(state))
    assert digests_on_disk(folder) == {
        "job/checkpoints/i000002": (3, "ab" * 32),
        "job/checkpoints/i000002/older-v000002.safetensors": (2, "cd" * 32),
    }
    for damaged in ((), (replace(says, tensors_digest="ef" * 32),)):
        (path / STATE_FILE).write_bytes(encode_json(replace(state, older=damaged)))
        with pytest.raises(ContractViolation, match=r"state\.json|older-v000002.*other adapters than it says"):
            digests_on_disk(folder)


@pytest.mark.parametrize(
    "data",
    [b"", b"1234", struct.pack("<Q", 10**15), struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"],
    ids=["empty", "short", "header beyond the file", "not JSON", "not an object"],
)
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(ContractViolation, match=r"bad\.safetensors"):
        digest_of([path])


def test_a_tensor_beyond_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ContractViolation, match="file not fully covered"):
        digest_of([path])


def test_a_delta_has_the_digest_of_what_it_makes_of_the_versions_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    publisher = DeltaPublisher(DeltaWeights(), FolderStore(folder, wait_s=60.0), announce=lambda shard: None)
    manifests = []
    for version in range(3):
        changed = {**TENSORS, "embedding": (torch.arange(1000) == version).bfloat16()}
        manifests.append(publish(publisher, changed, policy_version=version))
    assert [len(manifest.base) for manifest in manifests] == [0, 1, 2]
    expected = {manifest.directory: (manifest.policy_version, manifest.weights_digest) for manifest in manifests}
    assert digests_on_disk(folder) == expected
    delta = folder.weights_of(1) / DELTA_NAME.format(number=1, count=1)
    delta.write_bytes(delta.read_bytes()[:-3])
    with pytest.raises(ContractViolation, match="WeightDelta"):
        digests_on_disk(folder)
    shutil.rmtree(folder.weights_of(1))
    assert digests_on_disk(folder) == {manifests[0].directory: expected[manifests[0].directory]}


class Counted:
    """What a walk says of how far it is, and whether it ever says more than there is."""

    def __init__(self) -> None:
        self.expected = [0, 0]
        self.done = [0, 0]

    def expect(self, *, files: int = 0, num_bytes: int = 0) -> None:
        self.expected = [self.expected[0] + files, self.expected[1] + num_bytes]

    def add(self, *, files: int = 0, num_bytes: int = 0) -> None:
        self.done = [self.done[0] + files, self.done[1] + num_bytes]
        assert self.done <= self.expected


def test_hashing_tells_of_each_file_and_byte_and_finds_the_same(tmp_path: Path) -> None:
    """Whole versions, a delta, rows of ranks and a checkpoint in one file."""
    folder = RunFolder(tmp_path, "job-1")
    for path in (folder.weights_of(1) / "weights-00001-of-00001.safetensors", folder.checkpoint_after(2)):
        file = path if path.suffix else path / "model.safetensors"
        file.parent.mkdir(parents=True)
        save_file(TENSORS, file)
    rows = folder.checkpoint_after(3)
    rows.mkdir()
    for rank in range(2):
        part = {"layer.weight": TENSORS["layer.weight"].tensor_split(2)[rank].clone()}
        save_file(part, rows / f"model-{rank + 1:05d}-of-00002.safetensors")
    progress = Counted()
    assert digests_on_disk(folder, progress=progress) == digests_on_disk(folder)
    files = list(folder.path.rglob("*.safetensors"))
    assert progress.done == progress.expected == [4, sum(path.stat().st_size for path in files)]


def test_a_version_that_goes_while_it_is_to_be_hashed_is_counted_as_done(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job-1")
    for version in (1, 2):
        folder.weights_of(version).mkdir(parents=True)
        save_file(TENSORS, folder.weights_of(version) / "weights-00001-of-00001.safetensors")

    class Trains(Counted):
        def add(self, *, files: int = 0, num_bytes: int = 0) -> None:
            super().add(files=files, num_bytes=num_bytes)
            shutil.rmtree(folder.weights_of(2), ignore_errors=True)

    progress = Trains()
    assert list(digests_on_disk(folder, progress=progress)) == ["job-1/weights/v000001"]
    assert progress.done == progress.expected
    assert progress.done[0] == 2
