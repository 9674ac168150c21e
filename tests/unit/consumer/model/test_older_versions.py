"""Older versions in a checkpoint: read back from any transport, published again by any, damaged ones never believed."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from consumer.model.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint, write_checkpoint
from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest
from contracts.weights import DeltaWeights, FileWeights, RedisWeights
from onbeat.weights.files.tensor_folder import save_tensors
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import layout_of
from onbeat.weights.receiver import PublishedVersions, read_back
from onbeat.weights.transports import make_stores
from tests.unit.onbeat.weights.adapter.test_adapters import Store as AdapterStore
from tests.unit.onbeat.weights.adapter.test_adapters import base, merged
from tests.unit.onbeat.weights.test_weight_store import Store as WeightStore
from tests.unit.onbeat.weights.test_weight_store import flip_a_bit, version

Store = WeightStore | AdapterStore
STORES: dict[str, Callable[[Path], Store]] = {
    "file": lambda root: WeightStore(FileWeights(), root),
    "delta": lambda root: WeightStore(DeltaWeights(snapshot_every_versions=4), root),
    "redis": lambda root: WeightStore(RedisWeights(), root),
    "adapters by file": lambda root: AdapterStore(FileWeights(), root),
    "adapters by redis": lambda root: AdapterStore(RedisWeights(), root),
}


def weights(store: Store, number: int) -> dict[str, Tensor]:
    return version(number) if isinstance(store, WeightStore) else merged(number)


class Saved:
    """Versions 0 to 3 were published; the checkpoint is of version 3, and takes 1 and 2 with it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store, self.folder = store, folder / "i000002"
        self.manifests = [store.publish(number) for number in range(4)]
        self.older = self.manifests[1:3]

    def write(self) -> Checkpoint:
        published = PublishedVersions(
            layout_of(weights(self.store, 0)),
            make_stores(self.store.folder.weight_root, lambda job_id: self.store.chunks),
        )
        tensors = {"weight": torch.zeros(2)}

        def save(scratch: Path) -> None:
            for name in ("model.safetensors", "optimizer.safetensors"):
                save_tensors(tensors, scratch / name)

        write_checkpoint(
            self.folder,
            job_id="job",
            iteration=2,
            weights_digest=tensors_digest(tensors),
            save=save,
            save_older=lambda scratch: published.save(self.older, scratch),
        )
        return read_checkpoint(self.folder)

    def publish_again(self, checkpoint: Checkpoint) -> list[WeightManifest]:
        """Publishes them as the trainer that takes over does."""
        publisher, layout = self.store.another_publisher(), layout_of(weights(self.store, 0))
        return [publisher.publish_stored(stored, layout) for stored in checkpoint.older]


@pytest.fixture(params=STORES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Saved:
    return Saved(STORES[request.param](tmp_path), tmp_path / "checkpoints")


@pytest.fixture
def by_file(tmp_path: Path) -> Saved:
    return Saved(STORES["file"](tmp_path), tmp_path / "checkpoints")


def lose_all(store: Store) -> None:
    store.chunks.data.clear()
    shutil.rmtree(store.folder.weights, ignore_errors=True)


def test_what_was_published_is_published_again_with_its_digest_after_all_of_it_is_lost(saved: Saved) -> None:
    if isinstance(saved.store, AdapterStore):
        saved.store.publish(3)
    checkpoint = saved.write()
    lose_all(saved.store)
    again = saved.publish_again(checkpoint)
    assert [one.weights_digest for one in again] == [one.weights_digest for one in saved.older]
    for number, manifest in zip((1, 2), again, strict=True):
        receiver = saved.store.receiver()
        assert receiver.load(manifest) == manifest.weights_digest
        assert all(torch.equal(tensor, weights(saved.store, number)[name]) for name, tensor in receiver.tensors.items())


def test_a_version_in_files_is_read_tensor_by_tensor_so_that_a_damaged_one_costs_no_other(tmp_path: Path) -> None:
    store = WeightStore(FileWeights(), tmp_path)
    manifest = store.publish(1)
    store.damage(manifest, flip_a_bit)
    found = read_back(manifest, layout_of(version(1)), make_stores(store.folder.weight_root))
    assert found.keys() == version(1).keys()
    assert sum(not torch.equal(found[name], tensor) for name, tensor in version(1).items()) == 1


def test_files_that_are_whole_stay_as_they_are_and_a_damaged_one_is_written_again(by_file: Saved) -> None:
    checkpoint = by_file.write()
    paths = [next(by_file.store.folder.weights_of(number).iterdir()) for number in (1, 2)]
    whole, written = paths[1].read_bytes(), paths[0].stat().st_mtime_ns
    paths[1].write_bytes(flip_a_bit(whole))
    assert by_file.publish_again(checkpoint) == by_file.older
    assert (paths[0].stat().st_mtime_ns, paths[1].read_bytes()) == (written, whole)


def test_adapters_take_no_whole_weights_into_a_checkpoint(tmp_path: Path) -> None:
    saved = Saved(STORES["adapters by file"](tmp_path), tmp_path / "checkpoints")
    saved.write()
    whole = sum(tensor.nbytes for tensor in base().values())
    sizes = [path.stat().st_size for path in saved.folder.glob("older-*")]
    assert len(sizes) == 2
    assert max(sizes) < whole / 2


@pytest.mark.parametrize("spoil", [flip_a_bit, lambda data: data[:-1], lambda data: b"", None])
def test_a_published_version_that_went_bad_is_not_taken_into_a_checkpoint(
    by_file: Saved, spoil: Callable[[bytes], bytes] | None
) -> None:
    path = next(by_file.store.folder.weights_of(1).iterdir())
    data = path.read_bytes()
    path.unlink()
    if spoil is not None:
        path.write_bytes(spoil(data))
    with pytest.raises(WeightsRejected, match="version 1"):
        by_file.write()
    assert list(by_file.folder.parent.iterdir()) == []


def latest(saved: Saved, *, versions: dict[int, str] | None = None) -> Checkpoint | None:
    known = {one.policy_version: one.weights_digest for one in saved.manifests}
    known[3] = read_checkpoint(saved.folder).state.weights_digest
    return latest_checkpoint(
        saved.folder.parent,
        job_id="job",
        versions=known | (versions or {}),
        older_than=lambda version: range(max(0, version - 2), version),
    )


def test_a_checkpoint_whose_older_version_is_damaged_absent_or_not_the_chains_is_skipped(
    by_file: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    by_file.write()
    assert latest(by_file) is not None
    with caplog.at_level(logging.WARNING):
        assert latest(by_file, versions={1: "0" * 64}) is None
        assert "its version 1 is not one of this job" in caplog.text
        file = by_file.folder / "older-v000001.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        assert latest(by_file) is None
        assert "older-v000001.safetensors: is damaged" in caplog.text
        by_file.older = by_file.older[1:]
        by_file.write()
        assert latest(by_file) is None
        assert "it lacks version 1" in caplog.text


def test_a_checkpoint_without_older_versions_has_no_word_of_them(by_file: Saved) -> None:
    by_file.older = []
    checkpoint = by_file.write()
    assert checkpoint.older == []
    assert b"older" not in (by_file.folder / "state.json").read_bytes()


def test_stored_tensors_that_are_not_the_version_are_not_published_as_it(by_file: Saved) -> None:
    checkpoint = by_file.write()
    file = by_file.folder / "older-v000002.safetensors"
    file.write_bytes(flip_a_bit(file.read_bytes()))
    with pytest.raises(WeightsRejected, match="what is stored of version 2"):
        by_file.publish_again(checkpoint)
