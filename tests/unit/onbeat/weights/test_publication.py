"""A version goes out tensor by tensor: in any order, bounded in memory, whole or not at all."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from contracts.errors import ContractViolation, DeadlineExceeded, OnbeatError, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest, WeightShard
from contracts.weights import DeltaWeights
from onbeat.weights import publication as publication_module
from onbeat.weights.chunks import chunk_files
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.files.store import FolderFiles, FolderStore
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import layout_of
from onbeat.weights.publication import Publication
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.stores import VersionFile
from onbeat.weights.transports import make_stores
from tests.builders import manifest
from tests.publishing import publish
from tests.unit.onbeat.weights.test_weight_store import TRANSPORTS, Store, assert_equal, version

DEADLINE_S = 60.0
LAYOUT = layout_of({name: torch.zeros(4, dtype=torch.uint8) for name in "abc"})


class GatedSink:
    """Writes a tensor when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.put_names: list[str] = []
        self.was_closed = self.was_discarded = False
        self.error: OnbeatError | None = None

    def put(self, name: str, tensor: Tensor) -> None:
        assert self.gate.acquire(timeout=DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.put_names.append(name)

    def close(self, weights_digest: str) -> WeightManifest:
        self.was_closed = True
        return manifest(1, weights_digest, dtype="uint8")

    def discard(self) -> None:
        self.was_discarded = True


def one(value: int) -> Tensor:
    return torch.full((4,), value, dtype=torch.uint8)


def test_the_caller_goes_on_while_tensors_are_written_and_those_that_nobody_holds_are_let_go() -> None:
    sink = GatedSink()
    with Publication(LAYOUT, sink, wait_s=DEADLINE_S) as publication:
        arrays = {name: np.full(4, number, dtype=np.uint8) for number, name in enumerate("abc")}
        # The memory, not the object that stands for it.
        alive = [weakref.ref(array) for array in arrays.values()]
        tensors = {name: torch.from_numpy(arrays.pop(name)) for name in "abc"}
        digest = tensors_digest(tensors)
        for name in "abc":
            publication.add(name, tensors.pop(name))
        assert sink.put_names == []
        sink.gate.release(3)
        assert publication.finish().weights_digest == digest
    assert sink.put_names == ["a", "b", "c"]
    assert (sink.was_closed, sink.was_discarded) == (True, False)
    assert [ref() for ref in alive] == [None] * 3


@pytest.mark.parametrize("together_bytes", [4, 1000])  # 1,000: what waits for more goes out when room is asked for
def test_a_tensor_that_lives_for_the_publication_alone_is_made_when_there_is_room(
    together_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "PASSING_BYTES", 8)
    monkeypatch.setattr(publication_module, "TOGETHER_BYTES", together_bytes)
    sink, made = GatedSink(), threading.Semaphore(0)
    with Publication(LAYOUT, sink, wait_s=DEADLINE_S) as publication:

        def make_all() -> None:
            for number, name in enumerate("abc"):
                publication.make_room(4)
                made.release()
                publication.add(name, one(number))

        maker = threading.Thread(target=make_all, daemon=True)
        maker.start()
        for _ in "ab":
            assert made.acquire(timeout=DEADLINE_S)
        assert not made.acquire(blocking=False)
        num_freed = 1 if together_bytes == 4 else 2
        sink.gate.release(num_freed)
        assert made.acquire(timeout=DEADLINE_S)
        maker.join(DEADLINE_S)
        sink.gate.release(3 - num_freed)
        publication.finish()


def test_a_storage_that_takes_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication_module, "PASSING_BYTES", 4)
    sink = GatedSink()
    publication = Publication(LAYOUT, sink, wait_s=1e-9)
    publication.add("a", one(1))
    with pytest.raises(DeadlineExceeded, match="room for the next tensor"):
        publication.make_room(4)
    sink.gate.release()
    publication.abandon()
    assert sink.was_discarded


def test_what_goes_wrong_in_the_threads_ends_the_publication_at_its_finish() -> None:
    sink = GatedSink()
    sink.error = OnbeatError("no space", field="weights")
    with Publication(LAYOUT, sink, wait_s=DEADLINE_S) as publication:
        for name in "abc":
            publication.add(name, one(1))
        sink.gate.release(3)
        with pytest.raises(OnbeatError, match="no space"):
            publication.finish()
    assert (sink.was_closed, sink.was_discarded) == (False, True)


def test_tensors_that_were_not_announced_come_twice_or_not_at_all_are_refused() -> None:
    sink = GatedSink()
    sink.gate.release(3)
    with Publication(LAYOUT, sink, wait_s=DEADLINE_S) as publication:
        publication.add("a", one(1))
        for name, tensor, problem in (
            ("a", one(2), "added twice"),
            ("d", one(1), "was not announced"),
            ("b", one(1).float(), "was not announced"),
            ("c", torch.zeros(5, dtype=torch.uint8), "was not announced"),
        ):
            with pytest.raises(ContractViolation, match=problem):
                publication.add(name, tensor)
        with pytest.raises(ContractViolation, match="b: 2 tensors are missing"):
            publication.finish()
    assert (sink.was_closed, sink.was_discarded) == (False, True)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tensors_may_come_in_any_order(tmp_path: Path, transport: str) -> None:
    store = Store(TRANSPORTS[transport], tmp_path)
    receiver = store.receiver()
    for number in range(2):
        tensors = version(number)
        with store.publisher.begin(layout_of(tensors), policy_version=number) as publication:
            for name in reversed(tensors):
                publication.add(name, tensors[name])
            manifest = publication.finish()
        assert receiver.load(manifest) == tensors_digest(tensors)
        assert_equal(receiver.tensors, tensors)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_version_that_is_abandoned_leaves_nothing_and_the_next_one_is_good(tmp_path: Path, transport: str) -> None:
    store = Store(TRANSPORTS[transport], tmp_path)
    receiver = store.receiver()
    receiver.load(store.publish(0))
    tensors = version(1)
    with store.publisher.begin(layout_of(tensors), policy_version=1) as publication:
        publication.add("embedding", tensors["embedding"])
    assert [path.name for path in store.folder.weights.glob("*")] in ([], ["v000000"])
    assert list(store.folder.weights.glob(".*")) == []
    for number in (1, 2):
        receiver.load(store.publish(number))
        assert_equal(receiver.tensors, version(number))


class DeltasAhead:
    """A publisher of small delta files, and a receiver that is told of each."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root, "job")
        self.announced: list[WeightShard] = []
        self.receiver = WeightReceiver({name: torch.zeros_like(t) for name, t in version(0).items()}, make_stores(root))
        self.publisher = self.another_publisher()
        self.receiver.load(publish(self.publisher, version(0), policy_version=0))

    def another_publisher(self) -> DeltaPublisher:
        def announce(shard: WeightShard) -> None:
            self.announced.append(shard)
            self.receiver.load_ahead(shard)

        return DeltaPublisher(
            DeltaWeights(), FolderStore(self.folder, wait_s=DEADLINE_S), announce=announce, delta_shard_bytes=10_000
        )

    def put_in_place(self) -> set[str]:
        """Tensors that are those of version 1 already."""
        return {name for name, tensor in self.receiver.tensors.items() if torch.equal(tensor, version(1)[name])}


def test_deltas_are_applied_while_the_rest_of_their_version_is_compared(tmp_path: Path) -> None:
    ahead = DeltasAhead(tmp_path)
    tensors = version(1)
    manifest = publish(ahead.publisher, tensors, policy_version=1)
    assert len(manifest.files) == 2
    assert [shard.name for shard in ahead.announced] == [manifest.files[0].name]
    assert ahead.put_in_place() == {"embedding", "layer.bias"}
    # What was put in place is not read again.
    (tmp_path / manifest.directory / manifest.files[0].name).write_bytes(b"0" * manifest.files[0].num_bytes)
    assert ahead.receiver.load(manifest) == manifest.weights_digest
    assert_equal(ahead.receiver.tensors, tensors)


def test_a_delta_that_is_announced_twice_is_applied_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ahead = DeltasAhead(tmp_path)
    tensors = version(1)
    manifest = publish(ahead.publisher, tensors, policy_version=1)
    # As the announcement of the file that was put in place, which lies elsewhere by now.
    first = ahead.announced[0]
    ahead.receiver.load_ahead(replace(first, path=f"{manifest.directory}/{first.name}"))
    assert ahead.put_in_place() == {"embedding", "layer.bias"}
    assert ahead.receiver.load(manifest) == manifest.weights_digest
    assert caplog.messages == []


def test_a_delta_that_stands_on_a_version_that_is_not_here_is_left_alone(tmp_path: Path) -> None:
    ahead = DeltasAhead(tmp_path)
    silent = DeltaPublisher(DeltaWeights(), FolderStore(ahead.folder, wait_s=DEADLINE_S), announce=lambda shard: None)
    manifests = [publish(silent, version(number), policy_version=number) for number in (0, 1, 2)]
    (delta, *_) = manifests[2].files
    assert manifests[2].base
    path = f"{manifests[2].directory}/{delta.name}"
    ahead.receiver.load_ahead(WeightShard(policy_version=2, path=path, name=delta.name, num_bytes=delta.num_bytes))
    assert_equal(ahead.receiver.tensors, version(0))
    assert ahead.receiver.load(manifests[2]) == manifests[2].weights_digest


def test_a_file_of_chunks_that_is_larger_than_any_delta_is_refused_before_one_is_read(tmp_path: Path) -> None:
    def chunks(job_id: str) -> NoReturn:
        raise AssertionError("nothing is read")

    file = VersionFile(policy_version=1, directory="job/v1", name="a", num_bytes=10)
    with pytest.raises(WeightsRejected, match="larger than any delta"):
        chunk_files(chunks, FolderFiles(tmp_path)).content(file, most_bytes=9)


def test_deltas_of_a_version_that_never_came_are_undone_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "TOGETHER_BYTES", 1)
    ahead = DeltasAhead(tmp_path)
    tensors = version(1)
    with ahead.publisher.begin(layout_of(tensors), policy_version=1) as publication:
        publication.add("embedding", tensors["embedding"])
    assert ahead.put_in_place() == {"embedding", "layer.bias"}
    # Its trainer died; another one publishes version 1 whole, and then deltas again.
    ahead.publisher = ahead.another_publisher()
    for number in (1, 2, 3):
        manifest = publish(ahead.publisher, version(number), policy_version=number)
        assert ahead.receiver.load(manifest) == manifest.weights_digest
        assert_equal(ahead.receiver.tensors, version(number))
    assert len(manifest.base) == 2


def test_deltas_of_another_version_1_are_refused_and_the_chain_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = DeltasAhead(tmp_path)
    publish(ahead.publisher, version(2), policy_version=1)
    other = DeltasAhead(tmp_path / "other")
    manifest = publish(other.publisher, version(1), policy_version=1)
    (tmp_path / "job").rename(tmp_path / "away")
    (tmp_path / "other" / "job").rename(tmp_path / "job")
    assert ahead.put_in_place() != set(version(1))
    assert ahead.receiver.load(manifest) == manifest.weights_digest
    assert_equal(ahead.receiver.tensors, version(1))
    # It is noticed before the rest is applied, and not afterwards by the digest.
    assert caplog.messages == ["shards of another version 1 were put in place; reading the whole version"]


def test_a_delta_that_is_announced_to_a_receiver_of_another_version_changes_nothing(tmp_path: Path) -> None:
    ahead = DeltasAhead(tmp_path)
    manifest = publish(ahead.publisher, version(1), policy_version=1)
    held = ahead.receiver.load(manifest)
    ahead.receiver.load_ahead(ahead.announced[0])
    moved = WeightShard(
        policy_version=2,
        path=f"{manifest.directory}/{manifest.files[0].name}",
        name=manifest.files[0].name,
        num_bytes=1,
    )
    ahead.receiver.load_ahead(moved)
    assert_equal(ahead.receiver.tensors, version(1))
    assert held == manifest.weights_digest


def test_a_receiver_goes_on_from_what_it_holds_whatever_was_announced_in_between(tmp_path: Path) -> None:
    ahead = DeltasAhead(tmp_path)
    whole, first = ahead.folder.weights_of(0), publish(ahead.publisher, version(1), policy_version=1)
    ahead.receiver.load(first)
    of_another_version = WeightShard(
        policy_version=3, path=f"{first.directory}/{first.files[0].name}", name=first.files[0].name, num_bytes=1
    )
    ahead.receiver.load_ahead(of_another_version)
    second = publish(ahead.publisher, version(2), policy_version=2)
    whole.rename(tmp_path / "away")
    assert ahead.receiver.load(second) == second.weights_digest
    assert_equal(ahead.receiver.tensors, version(2))


def test_a_receiver_that_missed_every_announcement_reads_no_whole_version_either(tmp_path: Path) -> None:
    ahead, told = DeltasAhead(tmp_path), DeltasAhead(tmp_path / "other")
    receiver, ahead.receiver = ahead.receiver, told.receiver
    first = publish(ahead.publisher, version(1), policy_version=1)
    ahead.folder.weights_of(0).rename(tmp_path / "away")
    assert receiver.load(first) == first.weights_digest
    assert_equal(receiver.tensors, version(1))


def test_a_delta_on_another_base_is_refused_before_it_is_applied(tmp_path: Path) -> None:
    ours, others = DeltasAhead(tmp_path), DeltasAhead(tmp_path / "other")
    manifest = publish(ours.publisher, version(1), policy_version=1)
    others.receiver.load(publish(others.publisher, version(2), policy_version=1))
    other = publish(others.publisher, version(3), policy_version=2)
    others.folder.weights_of(2).rename(ours.folder.weights_of(2))
    with pytest.raises(WeightsRejected, match="stands on another version 1"):
        ours.receiver.load(replace(other, base=(*manifest.base, manifest.steps[-1])))


def test_a_version_that_was_read_whole_and_refused_is_not_read_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ahead = DeltasAhead(tmp_path)
    manifest = publish(ahead.publisher, version(1), policy_version=1)
    newcomer = WeightReceiver({name: torch.zeros_like(t) for name, t in version(0).items()}, make_stores(tmp_path))
    with pytest.raises(WeightsRejected, match=r"f{64}"):
        newcomer.load(replace(manifest, weights_digest="f" * 64))
    assert caplog.messages == []


def test_a_damaged_delta_that_was_applied_ahead_is_refused_and_never_counts(tmp_path: Path) -> None:
    ahead = DeltasAhead(tmp_path)
    tensors = version(1)
    manifest = publish(ahead.publisher, tensors, policy_version=1)
    with torch.no_grad():
        ahead.receiver.tensors["layer.weight"][0, 0] += 1.0
    path = tmp_path / manifest.directory / manifest.files[1].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(WeightsRejected):
        ahead.receiver.load(manifest)
    path.write_bytes(whole)
    assert ahead.receiver.load(manifest) == manifest.weights_digest
