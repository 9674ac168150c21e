"""Checkpoints: bit-exact resume, verified reading, nothing half-written."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from consumer.gradient.accumulation import ExactAccumulator
from consumer.gradient.micro_step import train_micro_batch
from consumer.gradient.optimizer import PolicyOptimizer, learning_rate_at
from consumer.gradient.saved_state import restore_state, save_state
from consumer.model.checkpoint import (
    Checkpoint,
    keep_newest_and_best,
    latest_checkpoint,
    read_checkpoint,
    set_aside_after,
    write_checkpoint,
)
from consumer.model.policy import Policy, load_policy
from contracts.checkpoints import FORMAT_VERSION
from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound, OnbeatError, WeightsRejected
from contracts.run_folder import CHECKPOINT, RunFolder, numbered
from contracts.spec.root import SpecRoot
from onbeat.weights.hashing import tensors_digest
from tests.builders import job_spec, rollout_batch, tiny_model_folder

SPEC = job_spec(optimizer__learning_rate=1e-2, optimizer__schedule="cosine", optimizer__warmup_iterations=1)


class Run:
    """The numeric core of a trainer: a policy, its optimizer, and iterations of two batches."""

    def __init__(self, model_root: Path) -> None:
        self.policy: Policy = load_policy(SPEC.model, model_root=SpecRoot(model_root), gradient_checkpointing=False)
        parameters = self.policy.trained_parameters()
        self.optimizer = PolicyOptimizer(parameters, SPEC.optimizer)
        self.accumulator = ExactAccumulator(parameters, max_micro_batches=2)

    def train(self, iteration: int) -> None:
        for index in range(2):
            batch = rollout_batch(seed=10 * iteration + index, batch_id=f"{iteration}/train/{index}")
            train_micro_batch(self.policy, batch, reference=None, spec=SPEC, accumulator=self.accumulator)
        rate = learning_rate_at(iteration, SPEC.optimizer, SPEC.iterations)
        self.optimizer.step(rate, self.accumulator.gradients(16))
        self.accumulator.finish()

    def digest(self) -> str:
        return tensors_digest(self.policy.weights())

    def save(self, checkpoints: Path, iteration: int) -> Path:
        folder = checkpoints / f"i{iteration:06d}"
        write_checkpoint(
            folder,
            job_id="job",
            iteration=iteration,
            weights_digest=self.digest(),
            save=lambda scratch: save_state(scratch, self.policy, self.optimizer),
        )
        return folder


@pytest.fixture
def model_root(tmp_path: Path) -> Path:
    tiny_model_folder(tmp_path)
    return tmp_path


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return RunFolder(tmp_path / "runs", "job").checkpoints


def test_four_steps_are_two_steps_a_checkpoint_and_two_more_bit_for_bit(model_root: Path, checkpoints: Path) -> None:
    straight = Run(model_root)
    for iteration in range(4):
        straight.train(iteration)

    first = Run(model_root)
    for iteration in range(2):
        first.train(iteration)
    first.save(checkpoints, 1)
    random_after = torch.rand(3)

    resumed = Run(model_root)
    checkpoint = latest_checkpoint(checkpoints, job_id="job", versions=versions_in(checkpoints))
    assert checkpoint is not None
    restore_state(checkpoint, resumed.policy, resumed.optimizer)
    assert torch.equal(torch.rand(3), random_after)
    assert (checkpoint.state.iteration, checkpoint.state.policy_version) == (1, 2)
    for iteration in range(2, 4):
        resumed.train(iteration)

    assert resumed.digest() == straight.digest()
    expected = straight.optimizer.state_tensors()
    assert resumed.optimizer.state_tensors().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.optimizer.state_tensors().items())


def versions_in(checkpoints: Path) -> dict[int, str]:
    """Version → digest, as the audit chain would have them."""
    states = [
        decode_json((folder / "state.json").read_bytes(), dict) for _, folder in numbered(checkpoints, CHECKPOINT)
    ]
    return {state["policy_version"]: state["weights_digest"] for state in states}


def saved(model_root: Path, checkpoints: Path, iterations: int = 1) -> Path:
    run = Run(model_root)
    folder = checkpoints
    for iteration in range(iterations):
        run.train(iteration)
        folder = run.save(checkpoints, iteration)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_one_flipped_byte_is_found_and_its_file_named(model_root: Path, checkpoints: Path, name: str) -> None:
    folder = saved(model_root, checkpoints)
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (folder / name).write_bytes(content)
    with pytest.raises(ContractViolation, match=name):
        read_checkpoint(folder)


def test_weights_of_another_version_are_rejected(model_root: Path, checkpoints: Path) -> None:
    folder = saved(model_root, checkpoints)
    state = read_checkpoint(folder).state
    (folder / "state.json").write_bytes(encode_json(msgspec.structs.replace(state, weights_digest="0" * 64)))
    with pytest.raises(WeightsRejected, match="not version 1 as recorded"):
        read_checkpoint(folder)


def test_a_missing_file_is_named(model_root: Path, checkpoints: Path) -> None:
    folder = saved(model_root, checkpoints)
    (folder / "optimizer.safetensors").unlink()
    with pytest.raises(NotFound, match=r"optimizer\.safetensors"):
        read_checkpoint(folder)


def test_a_checkpoint_under_another_iterations_name_is_refused(model_root: Path, checkpoints: Path) -> None:
    renamed = saved(model_root, checkpoints).rename(checkpoints / "i000005")
    with pytest.raises(ContractViolation, match="says iteration 0, version 1"):
        read_checkpoint(renamed)


def test_a_format_of_the_future_is_refused(model_root: Path, checkpoints: Path) -> None:
    folder = saved(model_root, checkpoints)
    values = decode_json((folder / "state.json").read_bytes(), dict) | {"format_version": FORMAT_VERSION + 1}
    (folder / "state.json").write_bytes(encode_json(values))
    with pytest.raises(InvalidInput, match=f"format {FORMAT_VERSION + 1}"):
        read_checkpoint(folder)


def test_the_latest_skips_damaged_and_unfinished_ones_and_says_why(
    model_root: Path, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(model_root, checkpoints, iterations=3)
    (checkpoints / "i000002" / "model.safetensors").write_bytes(b"cut off")
    shutil.copytree(checkpoints / "i000000", checkpoints / ".i000009.abc")
    with caplog.at_level(logging.WARNING):
        checkpoint = latest_checkpoint(checkpoints, job_id="job", versions=versions_in(checkpoints))
    assert isinstance(checkpoint, Checkpoint)
    assert checkpoint.folder.name == "i000001"
    assert "checkpoint i000002 is skipped" in caplog.text
    assert "model.safetensors" in caplog.text


def test_a_foreign_jobs_checkpoint_is_not_resumed(model_root: Path, checkpoints: Path) -> None:
    saved(model_root, checkpoints)
    versions = versions_in(checkpoints)
    assert latest_checkpoint(checkpoints, job_id="another", versions=versions) is None
    assert latest_checkpoint(checkpoints / "nowhere", job_id="job", versions=versions) is None


@pytest.mark.parametrize("versions", [{}, {1: "0" * 64}], ids=["of no commit", "of another commit"])
def test_a_checkpoint_whose_version_the_chain_does_not_have_is_not_resumed(
    model_root: Path, checkpoints: Path, versions: dict[int, str]
) -> None:
    saved(model_root, checkpoints)
    assert latest_checkpoint(checkpoints, job_id="job", versions=versions) is None


def test_a_checkpoint_of_another_release_is_refused_and_not_skipped(model_root: Path, checkpoints: Path) -> None:
    saved(model_root, checkpoints)
    values = decode_json((checkpoints / "i000000" / "state.json").read_bytes(), dict) | {"format_version": 1}
    (checkpoints / "i000000" / "state.json").write_bytes(encode_json(values))
    with pytest.raises(InvalidInput, match="resume it with the release that wrote it"):
        latest_checkpoint(checkpoints, job_id="job", versions=versions_in(checkpoints))


def test_a_checkpoint_of_another_model_is_refused(model_root: Path, checkpoints: Path, tmp_path: Path) -> None:
    folder = saved(model_root, checkpoints)
    tiny_model_folder(tmp_path / "wide", hidden_size=64)
    other = Run(tmp_path / "wide")
    with pytest.raises(InvalidInput, match="has shape"):
        restore_state(read_checkpoint(folder), other.policy, other.optimizer)


@pytest.mark.parametrize(
    ("iteration", "kept", "aside"),
    [(1, ["i000000", "i000001"], ["i000002", "i000003"]), (-1, [], ["i000000", "i000001", "i000002", "i000003"])],
)
def test_what_came_after_the_start_is_put_aside_and_the_rest_of_dead_writers_goes(
    checkpoints: Path, iteration: int, kept: list[str], aside: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("i000000", "i000001", "i000002", "i000003", ".i000002.0123456789ab", ".i000007.0123456789ab"):
        (checkpoints / name).mkdir(parents=True)
        (checkpoints / name / "state.json").write_text(name)
    set_aside_after(checkpoints, iteration)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["aside", *kept]
    assert {path.name: (path / "state.json").read_text() for path in (checkpoints / "aside").iterdir()} == {
        name: name for name in aside
    }
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        f"this start can't go on from {len(aside)} folders, and has moved them to {checkpoints / 'aside'}"
    )
    assert ", ".join(aside) in line


def test_what_is_put_aside_again_replaces_nothing(checkpoints: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text in ("first", "second", "third"):
        (checkpoints / "i000004").mkdir(parents=True)
        (checkpoints / "i000004" / "state.json").write_text(text)
        set_aside_after(checkpoints, 3)
    found = {path.parent.name: path.read_text() for path in (checkpoints / "aside").glob("*/state.json")}
    assert found == {"i000004": "first", "i000004.2": "second", "i000004.3": "third"}
    assert "it has 3 folders" in caplog.text
    assert numbered(checkpoints, CHECKPOINT) == []
    set_aside_after(checkpoints, 3)
    assert len(caplog.records) == 3, "nothing more was put aside, and nothing is said"


def test_a_checkpoint_that_cannot_be_put_aside_ends_the_start(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkpoints / "i000004").mkdir(parents=True)
    (checkpoints / "aside").write_text("in the way")
    with pytest.raises(OnbeatError, match="cannot be put aside"):
        set_aside_after(checkpoints, 3)
    assert (checkpoints / "i000004").is_dir()


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ({2: 0.9, 3: 0.5}, ["i000001", "i000004"]),
        ({2: 0.7, 3: 0.7, 4: 0.6}, ["i000001", "i000004"]),
        ({1: 0.1, 5: 0.8}, ["i000004"]),
        ({0: 0.9, 9: 0.9}, ["i000004"]),
    ],
    ids=["best", "oldest of equals", "the newest is the best", "no checkpoint's version was evaluated"],
)
def test_the_best_by_the_score_of_its_version_is_kept_beside_the_newest(
    checkpoints: Path, scores: dict[int, float], kept: list[str]
) -> None:
    for iteration in range(5):
        (checkpoints / f"i{iteration:06d}").mkdir(parents=True)
    keep_newest_and_best(checkpoints, 1, scores=scores, needed=(3,))
    names = [folder.name for _, folder in numbered(checkpoints, CHECKPOINT)]
    assert names == sorted({*kept, "i000002"})  # of version 3


def test_writing_an_iteration_again_replaces_it(model_root: Path, checkpoints: Path) -> None:
    run = Run(model_root)
    run.train(0)
    run.save(checkpoints, 0)
    run.train(1)
    folder = run.save(checkpoints, 0)
    assert read_checkpoint(folder).state.weights_digest == run.digest()
    assert [path.name for path in checkpoints.iterdir()] == ["i000000"]


def test_a_full_disk_names_the_folder_and_leaves_the_previous_checkpoint_alone(
    model_root: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(model_root)
    run.train(0)
    run.save(checkpoints, 0)
    run.train(1)

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    for iteration in (0, 1):
        with pytest.raises(OnbeatError, match=rf"i00000{iteration}: cannot write: .*No space left"):
            run.save(checkpoints, iteration)
    assert [path.name for path in checkpoints.iterdir()] == ["i000000"]
    assert read_checkpoint(checkpoints / "i000000").state.iteration == 0


def test_a_folder_that_cannot_be_made_is_named(model_root: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Run(model_root)
    run.train(0)
    with pytest.raises(OnbeatError, match="cannot write"):
        run.save(tmp_path / "file", 0)


def test_model_file_loads_with_plain_safetensors(model_root: Path, checkpoints: Path, tmp_path: Path) -> None:
    folder = saved(model_root, checkpoints)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "copy.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float32
