"""Versions beside the one that an engine samples from: received whole, put into use unread, never taken for another."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from contracts.errors import WeightsRejected
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest, WeightShard
from contracts.weights import DeltaWeights, FileWeights, WeightsSpec
from onbeat.weights import held_versions
from onbeat.weights.arrival import EngineTensors, identity
from onbeat.weights.delta.codec import DELTA_NAME
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files import store as folder_store
from onbeat.weights.files.store import FolderStore
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.held_versions import HeldVersions
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.transports import make_publisher, make_stores
from onbeat.weights.whole import WholePublisher
from tests.builders import flip_a_bit, job_spec
from tests.publishing import publish
from tests.unit.onbeat.weights.test_weight_store import TRANSPORTS, FakeChunks, Tensors, version

WAIT_S = 60.0


class Engine:
    """An engine's tensors, the versions that it holds, and the trainer that publishes them."""

    def __init__(self, root: Path, weights: WeightsSpec, *, job_id: str = "job", beside_bytes: int = 2**30) -> None:
        self.chunks = FakeChunks()
        self.folder = RunFolder(root, job_id)
        self.targets = {name: torch.zeros_like(tensor) for name, tensor in version(0).items()}
        self.versions = HeldVersions(
            self.targets, make_stores(root, lambda job_id: self.chunks), beside_bytes=beside_bytes
        )
        self._weights = weights
        self.publisher = self.another_publisher()
        self.announced: list[WeightManifest] = []

    def another_publisher(self) -> WeightPublisher:
        """The publisher of a trainer that takes over."""
        spec = job_spec(weights=self._weights)
        return make_publisher(spec, self.folder, chunks=self.chunks, announce=lambda _: None, pause=lambda _: None)

    def publish(self, number: int, tensors: Tensors | None = None, *, keeps: int = 9) -> WeightManifest:
        """Announces a version, and that of all before it only the newest `keeps` - 1 are announced still."""
        manifest = publish(self.publisher, tensors or version(number), policy_version=number)
        before = [one for one in self.announced if one.policy_version != number]
        self.announced = [*before, manifest][-keeps:]
        return manifest

    def receive(self, num_versions: int = 2) -> bool:
        return self.versions.receive(self.announced, num_versions=num_versions)

    def samples_from(self, number: int) -> bool:
        return self.has(version(number))

    def has(self, tensors: Tensors) -> bool:
        return all(torch.equal(self.targets[name], tensor) for name, tensor in tensors.items())

    def lose_all(self) -> None:
        """Nothing can be read again."""
        shutil.rmtree(self.folder.weights, ignore_errors=True)
        self.chunks.data.clear()

    @property
    def numbers(self) -> list[int]:
        return sorted(number for number, _ in self.versions.verified_versions)


@pytest.fixture(params=TRANSPORTS)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Engine:
    return Engine(tmp_path, TRANSPORTS[request.param])


@pytest.fixture
def files(tmp_path: Path) -> Engine:
    return Engine(tmp_path, FileWeights())


def test_a_version_is_received_beside_the_one_in_use_and_put_into_use_without_being_read_again(engine: Engine) -> None:
    engine.versions.load(engine.publish(0))
    manifest = engine.publish(1)
    assert engine.receive()
    assert engine.samples_from(0)
    assert not engine.receive(), "there is no other"
    engine.lose_all()
    assert engine.versions.load(manifest) == manifest.weights_digest == tensors_digest(engine.targets)
    assert engine.samples_from(1)


def test_an_older_version_of_the_window_comes_back_without_being_read_again(engine: Engine) -> None:
    manifests = [engine.publish(number) for number in range(3)]
    engine.versions.load(manifests[0])
    while engine.receive(num_versions=3):
        assert engine.samples_from(0)
    engine.lose_all()
    for number in (1, 2, 0, 2, 1):
        assert engine.versions.load(manifests[number]) == tensors_digest(engine.targets)
        assert engine.samples_from(number)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_whole_job_is_sampled_from_at_most_its_window_of_versions(engine: Engine, lag: int) -> None:
    engine.versions.load(engine.publish(0))
    for number in range(1, 10):
        # Version `number` is announced while its predecessor's window is sampled.
        manifest = engine.publish(number, keeps=lag + 1)
        while engine.receive(num_versions=lag + 1):
            pass
        assert len(engine.versions.verified_versions) <= lag + 1
        assert number in engine.numbers
        assert engine.samples_from(number - 1)
        engine.versions.load(manifest)
        assert tensors_digest(engine.targets) == manifest.weights_digest


def test_of_several_announced_versions_the_next_one_is_received_first(files: Engine) -> None:
    manifests = [files.publish(number) for number in range(6)]
    files.versions.load(manifests[1])
    files.receive(num_versions=3)
    assert files.numbers == [1, 2]
    files.receive(num_versions=3)
    assert files.numbers == [1, 2, 3]
    assert not files.receive(num_versions=3), "what is needed next makes no room for what is needed later"
    files.versions.load(manifests[2])
    files.receive(num_versions=3)
    assert files.numbers == [2, 3, 4]


def test_what_is_not_announced_any_more_is_let_go_but_for_what_is_in_use(files: Engine) -> None:
    manifests = [files.publish(number) for number in range(4)]
    files.versions.load(manifests[0])
    while files.receive(num_versions=4):
        pass
    files.announced = manifests[2:]
    files.receive(num_versions=4)
    assert files.numbers == [0, 2, 3]


@pytest.mark.parametrize("ends", ["the job", "another comes"])
def test_all_memory_but_that_in_use_is_given_back(tmp_path: Path, ends: str) -> None:
    def num_memories() -> int:
        gc.collect()
        return sum(type(one) is EngineTensors for one in gc.get_objects())

    before = num_memories()
    files = Engine(tmp_path, FileWeights())
    manifests = [files.publish(number) for number in range(4)]
    files.versions.load(manifests[0])
    while files.receive(num_versions=4):
        pass
    files.versions.load(manifests[2])
    assert num_memories() == before + 4
    if ends == "the job":
        files.versions.receive((), num_versions=1)
        assert files.samples_from(2)
    else:
        other = Engine(tmp_path, FileWeights(), job_id="other").publish(0, version(0, seed=8))
        files.versions.load(other)
        assert files.has(version(0, seed=8))
    assert num_memories() == before + 1
    assert len(files.versions.verified_versions) == 1


def test_a_version_of_a_number_that_was_taken_back_is_not_used_for_its_successor(engine: Engine) -> None:
    engine.versions.load(engine.publish(0))
    engine.publish(1)
    engine.receive()
    engine.publisher = engine.another_publisher()
    engine.publisher.store.remove_after(0)
    again = engine.publish(1, version(1, seed=8))
    assert engine.versions.load(again) == again.weights_digest == tensors_digest(engine.targets)
    assert engine.has(version(1, seed=8))
    engine.receive()
    assert engine.versions.verified_versions.count(identity(again)) == 1


@pytest.mark.parametrize("damage", [flip_a_bit, Path.unlink])
@pytest.mark.parametrize("transport", ["file", "delta"])
def test_a_version_that_is_damaged_is_not_held_and_leaves_the_one_in_use_alone(
    tmp_path: Path, transport: str, damage: Callable[[Path], None]
) -> None:
    engine = Engine(tmp_path, TRANSPORTS[transport])
    engine.versions.load(engine.publish(0))
    manifest = engine.publish(1)
    damage(tmp_path / manifest.directory / manifest.files[0].name)
    for _ in range(2):
        with pytest.raises(WeightsRejected, match="version 1"):
            engine.receive()
        assert engine.samples_from(0)
        assert engine.numbers == [0]
    publish(engine.publisher, version(1), policy_version=1, is_again=True)
    assert engine.receive()
    engine.versions.load(manifest)
    assert engine.samples_from(1)


def test_a_file_that_comes_before_its_version_is_read_beside_what_is_sampled(tmp_path: Path) -> None:
    files = Engine(tmp_path, FileWeights())
    files.versions.load(files.publish(0))
    files.receive()
    announced: list[WeightShard] = []

    def announce(shard: WeightShard) -> None:
        announced.append(shard)
        files.versions.receive_ahead(shard)
        assert files.samples_from(0)
        assert files.numbers == [0]

    files.publisher = WholePublisher(FolderStore(files.folder, wait_s=WAIT_S), announce=announce, shard_bytes=10_000)
    manifest = files.publish(1)
    assert [shard.name for shard in announced] == [manifest.files[0].name]
    # Its values are damaged after they were read: what is in place is not read again.
    flip_a_bit(tmp_path / manifest.directory / manifest.files[0].name)
    assert files.receive()
    files.versions.load(manifest)
    assert files.samples_from(1)


def test_a_delta_that_comes_before_its_version_changes_a_copy(tmp_path: Path) -> None:
    engine = Engine(tmp_path, DeltaWeights())
    engine.versions.load(engine.publish(0))
    engine.receive()
    seen: list[list[int]] = []

    def announce(shard: WeightShard) -> None:
        engine.versions.receive_ahead(shard)
        seen.append(engine.numbers)
        assert engine.samples_from(0)

    engine.publisher = DeltaPublisher(
        DeltaWeights(), FolderStore(engine.folder, wait_s=WAIT_S), announce=announce, delta_shard_bytes=10_000
    )
    engine.publish(0)
    manifest = engine.publish(1)
    assert seen == [[0]] * (len(manifest.files) - 1) != []
    assert engine.receive()
    assert engine.versions.load(manifest) == tensors_digest(engine.targets)


def test_a_copy_that_a_delta_was_to_change_is_never_taken_for_the_version_it_copies(tmp_path: Path) -> None:
    """It was not hashed where it is."""
    engine = Engine(tmp_path, DeltaWeights())
    first = engine.publish(0)
    engine.versions.load(first)
    engine.receive()
    before = {name: tensor.data_ptr() for name, tensor in engine.targets.items()}
    gone = WeightShard(
        policy_version=1, path="job/weights/.v000001.0/delta-1", name=DELTA_NAME.format(number=1, count=2), num_bytes=1
    )
    engine.versions.receive_ahead(gone)
    assert engine.versions.verified_versions == (identity(first),)
    engine.versions.load(first)
    assert {name: tensor.data_ptr() for name, tensor in engine.targets.items()} == before


def test_shards_of_any_other_version_are_left_to_its_manifest(files: Engine) -> None:
    files.versions.receive_ahead(WeightShard(policy_version=1, path="job/x", name="x.safetensors", num_bytes=1))
    files.versions.load(files.publish(3))
    files.receive()
    for number in (2, 3, 5):
        manifest = files.publish(number, version(1))
        name = manifest.files[0].name
        shard = WeightShard(
            policy_version=number, path=f"{manifest.directory}/{name}", name=name, num_bytes=manifest.files[0].num_bytes
        )
        files.versions.receive_ahead(shard)
        assert files.numbers == [3]


def test_where_bytes_are_bounded_fewer_versions_are_held_or_none(tmp_path: Path) -> None:
    num_bytes = sum(tensor.nbytes for tensor in version(0).values())
    for beside_bytes, expected in ((num_bytes - 1, [0]), (2 * num_bytes, [0, 1, 2])):
        engine = Engine(tmp_path / str(beside_bytes), FileWeights(), beside_bytes=beside_bytes)
        manifests = [engine.publish(number) for number in range(4)]
        engine.versions.load(manifests[0])
        while engine.receive(num_versions=4):
            pass
        assert engine.numbers == expected
        engine.versions.load(manifests[3])
        assert engine.samples_from(3)


def test_an_engine_without_memory_for_another_version_goes_on_with_one(
    files: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manifests = [files.publish(number) for number in range(2)]
    files.versions.load(manifests[0])

    def exhausted(*_: Any, **__: Any) -> EngineTensors:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(held_versions, "EngineTensors", exhausted)
    assert not files.receive()
    assert "can't allocate memory" in caplog.text
    files.versions.load(manifests[1])
    assert files.samples_from(1)


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """(a reader has come to version 2, it may go on)."""
    reached, go_on = threading.Event(), threading.Event()
    honest = folder_store.read_shard

    def read(path: Path) -> Tensors:
        if "v000002" in str(path):
            reached.set()
            assert go_on.wait(WAIT_S)
        return honest(path)

    monkeypatch.setattr(folder_store, "read_shard", read)
    yield reached, go_on
    go_on.set()


def test_a_held_version_is_put_into_use_while_another_one_is_read(
    files: Engine, gated: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = gated
    manifests = [files.publish(number) for number in range(3)]
    files.versions.load(manifests[0])
    files.receive(num_versions=3)
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(files.receive, 3)
        assert reached.wait(WAIT_S)
        files.versions.load(manifests[1])
        assert files.samples_from(1)
        go_on.set()
        assert receiving.result(WAIT_S)
    assert files.numbers == [0, 1, 2]


def test_a_batch_that_needs_another_version_does_not_wait_for_the_one_that_is_received(
    files: Engine, gated: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = gated
    manifests = [files.publish(number) for number in range(4)]
    files.versions.load(manifests[1])
    with ThreadPoolExecutor(2) as threads:
        receiving = threads.submit(files.receive, 2)
        assert reached.wait(WAIT_S)
        loading = threads.submit(files.versions.load, manifests[3])
        while not files.versions._given_up.is_set():
            assert not loading.done()
        go_on.set()
        assert not receiving.result(WAIT_S)
        loading.result(WAIT_S)
    assert files.samples_from(3)
    assert 2 not in files.numbers


def test_a_batch_that_needs_the_version_that_is_received_takes_it(
    files: Engine, gated: tuple[threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    reached, go_on = gated
    manifests = [files.publish(number) for number in range(3)]
    files.versions.load(manifests[1])
    with ThreadPoolExecutor(2) as threads:
        receiving = threads.submit(files.receive, 2)
        assert reached.wait(WAIT_S)
        loading = threads.submit(files.versions.load, manifests[2])
        go_on.set()
        assert receiving.result(WAIT_S)
        loading.result(WAIT_S)
    assert files.samples_from(2)
    assert files.numbers == [1, 2]


def test_an_engine_that_is_closed_ends_what_it_receives(
    files: Engine, gated: tuple[threading.Event, threading.Event]
) -> None:
    reached, go_on = gated
    manifests = [files.publish(number) for number in range(3)]
    files.versions.load(manifests[1])
    with ThreadPoolExecutor(1) as thread:
        receiving = thread.submit(files.receive, 2)
        assert reached.wait(WAIT_S)
        files.versions.give_up()
        go_on.set()
        assert not receiving.result(WAIT_S)
    assert files.samples_from(1)
