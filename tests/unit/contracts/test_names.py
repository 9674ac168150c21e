"""Ids and names from other processes are checked where they become a path or a key, so that no door can forget it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import save_file

from broker.keys import OpenKeys
from consumer.model.checkpoint import read_checkpoint
from consumer.supervisor.trainer_process import TrainerProcess
from consumer.trainer.report import RunLog
from contracts.checkpoints import CheckpointState
from contracts.encoding.wire import decode, encode, encode_json
from contracts.errors import ContractViolation, NotFound, OnbeatError, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.versions import TensorDelta, WeightDelta, WeightFile, WeightManifest, WeightShard, WeightStep
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process.folders import make_missing, make_private
from onbeat.weights.arrival import Arrival, EngineTensors
from onbeat.weights.chunks import CHUNK_BYTES, MAX_VERSION_BYTES, read_chunks
from onbeat.weights.delta.codec import apply
from onbeat.weights.delta.reader import fill_delta
from onbeat.weights.files.store import FolderFiles
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.stores import VersionFile
from onbeat.weights.transports import make_stores
from tests import builders
from tests.builders import DIGEST, job_spec

BAD_IDS = ["../escape", "..", ".", "", "a/b", "a" * 65, "job\n", "job}:x", "/tmp/job", "jöb", "job\0"]
BAD_PATHS = ["../x", "/etc/passwd", "job/../../x", "job/weights/..", "job//x", "", "job/w\n", "job/\x1b[2J", "a" * 2000]
BAD_NAMES = ["../weights", "a/b", "..", ".", "", "/etc/passwd", "w\n", "w\0"]


@pytest.mark.parametrize("job_id", BAD_IDS)
def test_what_is_no_jobs_id_makes_no_path_and_no_key(tmp_path: Path, job_id: str) -> None:
    for make in (lambda: RunFolder(tmp_path, job_id), lambda: OpenKeys(job_id)):
        with pytest.raises(NotFound) as refused:
            make()
        assert refused.value.field == "job_id"


def test_no_trainer_is_started_for_a_forged_id(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        TrainerProcess(tmp_path / "runs").start("../escape")
    assert list(tmp_path.iterdir()) == []


def manifest(**changes: Any) -> WeightManifest:
    fields: dict[str, Any] = {"files": (WeightFile(name="weights.safetensors", num_bytes=1),)}
    return builders.manifest(1, **(fields | changes))


def forged(record: Any, old: str, new: str) -> bytes:
    """The record's bytes with another text in the place of one of its own."""

    def changed(value: Any) -> Any:
        match value:
            case dict():
                return {key: changed(one) for key, one in value.items()}
            case list():
                return [changed(one) for one in value]
        return new if value == old else value

    return encode(changed(decode(encode(record), Any)))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_folder_that_a_manifest_or_a_shard_names_lies_below_the_weight_root(path: str) -> None:
    step = WeightStep(policy_version=0, weights_digest=DIGEST, directory="job/weights/base", files=manifest().files)
    delta = manifest(transport="delta", base=(step,))
    shard = WeightShard(policy_version=1, path="job/weights/.v000001.ab/w", name="w", num_bytes=1)
    for record, old in ((manifest(), "job/weights/v000001"), (delta, "job/weights/base"), (shard, shard.path)):
        assert decode(forged(record, old, old), type(record)) == record
        with pytest.raises(ContractViolation):
            decode(forged(record, old, path), type(record))
    with pytest.raises(ContractViolation):
        manifest(directory=path)


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_file_that_a_manifest_or_a_checkpoint_names_is_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ContractViolation):
        decode(forged(manifest(), "weights.safetensors", name), WeightManifest)
    with pytest.raises(ContractViolation):
        manifest(files=(WeightFile(name=name, num_bytes=1),))
    state = CheckpointState(
        format_version=2,
        job_id="job",
        iteration=0,
        policy_version=1,
        weights_digest=DIGEST,
        torch_random_state="",
        files={name: DIGEST},
    )
    (tmp_path / "i000000").mkdir()
    (tmp_path / "i000000" / "state.json").write_bytes(encode_json(state))
    with pytest.raises(OnbeatError, match="damaged"):
        read_checkpoint(tmp_path / "i000000")


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_out_of_the_weight_root_is_not_followed(tmp_path: Path, linked: str) -> None:
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    folder = root / "job" / "weights" / "v000001"
    elsewhere.mkdir()
    save_file({"w": torch.ones(2)}, elsewhere / "weights.safetensors")
    if linked == "file":
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").symlink_to(elsewhere / "weights.safetensors")
    else:
        folder.parent.mkdir(parents=True)
        folder.symlink_to(elsewhere)
    num_bytes = (elsewhere / "weights.safetensors").stat().st_size
    receiver = WeightReceiver({"w": torch.zeros(2)}, make_stores(root))
    with pytest.raises(WeightsRejected, match="leads out of"):
        receiver.load(manifest(files=(WeightFile(name="weights.safetensors", num_bytes=num_bytes),)))


def bomb(num_elements: int) -> TensorDelta:
    zeros = zstandard.ZstdCompressor().compress(bytes(4 * num_elements))
    return TensorDelta(name="w", num_changed=num_elements, gaps=zeros, differences=zeros)


def test_a_delta_that_would_grow_beyond_its_tensor_is_refused_before_it_is_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delta = bomb(2**24)
    assert len(delta.differences) < 2**13
    monkeypatch.setattr(zstandard, "ZstdDecompressor", lambda: pytest.fail("it was unpacked"))
    with pytest.raises(WeightsRejected, match="changes 16777216 of 4 elements"):
        apply(delta, np.zeros(16, dtype=np.uint8), item_bytes=4)


def test_a_delta_file_larger_than_any_delta_of_the_model_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "job" / "weights" / "v000001" / "delta-00001-of-00001.msgpack"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(2**40)
    memory, arrival = EngineTensors({"w": torch.zeros(2)}), Arrival(policy_version=1, base=(0, DIGEST))
    step = WeightStep(policy_version=0, weights_digest=DIGEST, directory="job/weights/v000000", files=manifest().files)
    files = (WeightFile(name=path.name, num_bytes=2**40),)
    with pytest.raises(WeightsRejected, match="larger than any delta"):
        fill_delta(FolderFiles(tmp_path), manifest(transport="delta", base=(step,), files=files), memory, arrival)


@pytest.mark.parametrize("num_bytes", [MAX_VERSION_BYTES + 1, 2**60])
def test_a_version_in_redis_has_the_size_that_redis_takes(num_bytes: int) -> None:
    class Chunks:
        def get(self, policy_version: int, name: str, number: int) -> bytes:
            raise AssertionError("nothing is read")

    with pytest.raises(WeightsRejected, match=f"says that it has {num_bytes} bytes"):
        read_chunks(Chunks(), VersionFile(policy_version=1, directory="job/v1", name="w", num_bytes=num_bytes))


def test_a_chunk_has_the_size_of_a_chunk() -> None:
    class Chunks:
        def get(self, policy_version: int, name: str, number: int) -> bytes:
            return bytes(CHUNK_BYTES + 1)

    with pytest.raises(WeightsRejected, match="chunk 0"):
        read_chunks(Chunks(), VersionFile(policy_version=1, directory="job/v1", name="w", num_bytes=2 * CHUNK_BYTES))


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_plain_file_in_a_folder_that_is_verified_is_named(tmp_path: Path, kind: str) -> None:
    folder = RunFolder(tmp_path, "job")
    target = folder.weights_of(1) / "weights-00001-of-00001.safetensors"
    target.parent.mkdir(parents=True)
    if kind == "link":
        target.symlink_to("/dev/zero")
    else:
        os.mkfifo(target)
    with pytest.raises(ContractViolation, match="no plain file"):
        digests_on_disk(folder)


def test_a_delta_that_stands_on_itself_ends_the_check(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    folder.weights_of(3).mkdir(parents=True)
    delta = WeightDelta(base_version=3, base_digest=DIGEST, tensors=())
    (folder.weights_of(3) / "delta-00001-of-00001.msgpack").write_bytes(encode(delta))
    with pytest.raises(ContractViolation, match="stands on itself"):
        digests_on_disk(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_and_what_had_to_be_made_above_it_are_private(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "new" / "runs", "job")
    RunLog(folder, job_spec()).close()
    assert [mode(path) for path in (folder.path, folder.run_root, folder.run_root.parent)] == [0o700] * 3


def test_a_run_folder_of_an_earlier_release_is_closed_and_what_is_above_it_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "job").mkdir(parents=True)
    for path in (tmp_path / "runs", tmp_path / "runs" / "job"):
        path.chmod(0o755)
    make_private(tmp_path / "runs" / "job")
    assert (mode(tmp_path / "runs"), mode(tmp_path / "runs" / "job")) == (0o755, 0o700)
    make_missing(tmp_path / "runs" / "job")
    assert mode(tmp_path / "runs") == 0o755
