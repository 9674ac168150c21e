"""Versions by every transport: the same tensors, the same digest, and never a damaged one that counts as whole."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from contracts.errors import BrokerFull, DeadlineExceeded, InvalidInput, OnbeatError, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest, WeightShard, weights_digest
from contracts.weights import DeltaWeights, FileWeights, RedisWeights, WeightsSpec, has_deltas
from onbeat.weights import chunks as chunk_store
from onbeat.weights.delta.codec import DELTA_NAME
from onbeat.weights.files.store import FolderStore
from onbeat.weights.files.tensor_folder import are_same
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import layout_of, split_into_shards
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.transports import make_publisher, make_stores
from onbeat.weights.whole import WholePublisher
from tests.builders import job_spec
from tests.publishing import publish

TRANSPORTS: dict[str, WeightsSpec] = {
    "file": FileWeights(),
    "delta": DeltaWeights(snapshot_every_versions=4),
    "redis": RedisWeights(),
}
Tensors = dict[str, Tensor]


class FakeChunks:
    """The trainer's and the generator's side of versions in Redis, in memory."""

    def __init__(self) -> None:
        self.data: dict[tuple[int, str, int], bytes] = {}
        self.times_full = 0

    def put_chunk(self, policy_version: int, name: str, number: int, data: bytes, *, keep_s: float) -> None:
        if self.times_full:
            self.times_full -= 1
            raise BrokerFull("full")
        self.data[policy_version, name, number] = data

    def drop_chunks_before(self, policy_version: int, except_versions: Collection[int] = ()) -> None:
        stays = {*except_versions}
        self.data = {key: data for key, data in self.data.items() if key[0] >= policy_version or key[0] in stays}

    def get(self, policy_version: int, name: str, number: int) -> bytes | None:
        return self.data.get((policy_version, name, number))


class Store:
    """A publisher of one transport, receivers of what it publishes, and ways to damage it."""

    def __init__(self, weights: WeightsSpec, root: Path) -> None:
        self.chunks = FakeChunks()
        self.announced: list[WeightShard] = []
        self.pauses: list[float] = []
        self.folder = RunFolder(root, "job")
        self.spec: JobSpec = job_spec(weights=weights)
        self.publisher = self.another_publisher()

    def another_publisher(self) -> WeightPublisher:
        """The publisher of a trainer that takes over."""
        return make_publisher(
            self.spec, self.folder, chunks=self.chunks, announce=self.announced.append, pause=self.pauses.append
        )

    def receiver(self, like: Mapping[str, Tensor] | None = None) -> WeightReceiver:
        targets = {name: torch.zeros_like(tensor) for name, tensor in (like or version(0)).items()}
        return WeightReceiver(targets, make_stores(self.folder.weight_root, lambda job_id: self.chunks))

    def publish(self, number: int, tensors: Tensors | None = None) -> WeightManifest:
        return publish(self.publisher, version(number) if tensors is None else tensors, policy_version=number)

    def damage(self, manifest: WeightManifest, spoil: Callable[[bytes], bytes | None]) -> None:
        """Replaces the bytes of the version's own file or first chunk; None takes it away."""
        if manifest.transport == "redis":
            key = (manifest.policy_version, manifest.files[0].name, 0)
            spoilt = spoil(self.chunks.data.pop(key))
            if spoilt is not None:
                self.chunks.data[key] = spoilt
            return
        path = self.folder.weight_root / manifest.directory / manifest.files[0].name
        spoilt = spoil(path.read_bytes())
        path.unlink()
        if spoilt is not None:
            path.write_bytes(spoilt)

    def versions_left(self) -> list[int]:
        in_folders = {int(path.name[1:]) for path in self.folder.weights.glob("v*")}
        return sorted(in_folders | {key[0] for key in self.chunks.data})


@pytest.fixture(params=TRANSPORTS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(TRANSPORTS[request.param], tmp_path)


def version(number: int, seed: int = 7) -> Tensors:
    """Version 0 with one element in a hundred changed, again in each version, as a step in bfloat16 does."""
    draw = torch.Generator().manual_seed(seed)
    tensors: Tensors = {
        "embedding": torch.randn(300, 70, generator=draw).bfloat16(),
        "layer.weight": torch.randn(64, 33, generator=draw),
        "layer.bias": torch.arange(5, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }
    for _ in range(number):
        for name in ("embedding", "layer.weight"):
            flat = tensors[name].reshape(-1)
            flat[torch.randperm(flat.numel(), generator=draw)[: flat.numel() // 100]] *= 1.125
    tensors["steps"] += number
    return tensors


def flip_a_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def take_away(_data: bytes) -> None:
    return None


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_digest_is_that_of_the_little_endian_values() -> None:
    tensors = {
        "layer.weight": torch.full((2, 3), 1.0),
        "layer.bias": torch.arange(4, dtype=torch.bfloat16),
        "steps": torch.tensor(7),
    }
    expected = weights_digest(
        [
            ("layer.weight", "float32", (2, 3), struct.pack("<6f", *[1.0] * 6)),
            ("layer.bias", "bfloat16", (4,), struct.pack("<4H", 0, 0x3F80, 0x4000, 0x4040)),
            ("steps", "int64", (), struct.pack("<q", 7)),
        ]
    )
    assert tensors_digest(tensors) == expected
    transposed = {"w": torch.arange(6.0).view(2, 3).t()}
    assert tensors_digest(transposed) == tensors_digest({"w": transposed["w"].contiguous()})


def test_every_version_arrives_bit_for_bit_with_the_digest_of_its_values(store: Store) -> None:
    receiver = store.receiver()
    for number in range(7):
        manifest = store.publish(number)
        assert (manifest.policy_version, manifest.dtype) == (number, "bfloat16")
        assert not manifest.base or manifest.transport == store.spec.weights.__struct_config__.tag
        assert receiver.load(manifest) == manifest.weights_digest == tensors_digest(version(number))
        assert_equal(receiver.tensors, version(number))


def test_a_receiver_that_joins_late_or_missed_some_gets_the_same_tensors(store: Store) -> None:
    manifests = [store.publish(number) for number in range(7)]
    late, sometimes = store.receiver(), store.receiver()
    assert late.load(manifests[6]) == manifests[6].weights_digest
    for number in (1, 3, 6):
        sometimes.load(manifests[number])
    for receiver in (late, sometimes):
        assert_equal(receiver.tensors, version(6))


def test_an_engine_whose_tensors_lie_elsewhere_gets_them_from_host_memory(store: Store) -> None:
    on_meta = {name: tensor.to("meta") for name, tensor in version(0).items()}
    receiver = WeightReceiver(on_meta, make_stores(store.folder.weight_root, lambda job_id: store.chunks))
    transposed = {**version(0), "layer.weight": torch.zeros(33, 64).t()}
    copied = WeightReceiver(transposed, make_stores(store.folder.weight_root, lambda job_id: store.chunks))
    for number in range(2):
        manifest = store.publish(number)
        assert receiver.load(manifest) == copied.load(manifest)
    assert_equal(receiver.tensors, version(1))
    assert_equal(transposed, version(1))


@pytest.mark.parametrize("spoil", [flip_a_bit, cut, take_away])
def test_a_damaged_version_is_refused_until_it_is_repaired(
    store: Store, spoil: Callable[[bytes], bytes | None]
) -> None:
    receiver = store.receiver()
    receiver.load(store.publish(0))
    manifest = store.publish(1)
    store.damage(manifest, spoil)
    for _ in range(2):
        with pytest.raises(WeightsRejected, match="version 1"):
            receiver.load(manifest)
    publish(store.publisher, version(1), policy_version=1, is_again=True)
    assert receiver.load(manifest) == manifest.weights_digest
    assert_equal(receiver.tensors, version(1))
    following = store.publish(2)
    for one in (receiver, store.receiver()):
        one.load(following)
        assert_equal(one.tensors, version(2))


def test_a_version_of_another_model_is_refused_by_the_tensor(store: Store) -> None:
    changed: list[tuple[Tensors, str]] = [
        ({name: tensor for name, tensor in version(0).items() if name != "steps"}, "lacks 1 tensors.* steps"),
        ({**version(0), "more": torch.zeros(1)}, "1 tensors that the model lacks.* more"),
        ({**version(0), "layer.bias": torch.zeros(6).bfloat16()}, r"layer.bias .* bfloat16\[6\], .* bfloat16\[5\]"),
        ({**version(0), "layer.bias": torch.zeros(5)}, r"layer.bias .* float32\[5\], the model needs bfloat16\[5\]"),
    ]
    receiver = store.receiver()
    for number, (tensors, problem) in enumerate(changed):
        with pytest.raises(WeightsRejected, match=problem):
            receiver.load(store.publish(number, tensors))


def test_a_trainer_that_takes_over_publishes_the_same_digest(store: Store) -> None:
    receiver = store.receiver()
    first = [store.publish(number) for number in range(3)]
    receiver.load(first[2])
    store.publisher = store.another_publisher()
    replayed = [store.publish(number) for number in (1, 2, 3)]
    assert [manifest.weights_digest for manifest in replayed[:2]] == [one.weights_digest for one in first[1:]]
    for manifest in replayed:
        receiver.load(manifest)
        assert_equal(receiver.tensors, version(manifest.policy_version))


@pytest.mark.parametrize("first", range(6))
def test_what_a_claim_named_before_a_trainer_took_over_can_be_loaded_after(store: Store, first: int) -> None:
    before = [store.publish(number) for number in range(7)]
    store.publisher = store.another_publisher()
    for number in range(first, 7):
        store.publish(number)
    for manifest in before[first:]:
        receiver = store.receiver()
        receiver.load(manifest)
        assert_equal(receiver.tensors, version(manifest.policy_version))


def test_old_versions_go_but_for_those_that_newer_ones_or_generators_need(store: Store) -> None:
    manifests = [store.publish(number) for number in range(7)]
    store.publisher.remove_before(5, in_use={step.directory for step in manifests[2].steps})
    receiver = store.receiver()
    for number in (2, 5, 6):
        receiver.load(manifests[number])
        assert_equal(receiver.tensors, version(number))
    store.publisher.remove_before(6)
    assert store.versions_left() == ([4, 5, 6] if has_deltas(store.spec.weights) else [6])
    receiver.load(manifests[6])


def test_nothing_is_left_outside_the_run_folder(tmp_path: Path) -> None:
    for name, weights in TRANSPORTS.items():
        store = Store(weights, tmp_path / name)
        store.folder = RunFolder(tmp_path / name, "job", weight_root=tmp_path / name / "shm")
        store.publisher = store.another_publisher()
        manifest = store.publish(3)
        assert manifest.directory == "job/weights/v000003"
        store.receiver().load(manifest)
        store.publisher.store.remove_all()
        assert store.versions_left() == []


def test_a_delta_of_a_hundredth_is_a_fraction_of_the_version(tmp_path: Path) -> None:
    store = Store(TRANSPORTS["delta"], tmp_path)
    whole, delta = store.publish(0), store.publish(1)
    assert [file.name for file in delta.files] == [DELTA_NAME.format(number=1, count=1)]
    assert delta.base == whole.steps
    assert delta.files[0].num_bytes < 0.1 * whole.files[0].num_bytes


def test_a_whole_version_comes_every_so_often_and_where_a_delta_would_not_be_smaller(tmp_path: Path) -> None:
    store = Store(TRANSPORTS["delta"], tmp_path)
    num_steps = [len(store.publish(number).steps) for number in range(9)]
    assert num_steps == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    noise = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    store.publish(9, {"bytes": torch.zeros_like(noise), "bias": torch.zeros(1)})
    assert len(store.publish(10, {"bytes": noise, "bias": torch.zeros(1)}).steps) == 1


def test_a_delta_on_another_base_is_refused_and_the_whole_version_taken(tmp_path: Path) -> None:
    store = Store(TRANSPORTS["delta"], tmp_path)
    receiver = store.receiver()
    receiver.load(store.publish(0))
    manifest = store.publish(1)
    with torch.no_grad():
        receiver.tensors["embedding"][0, 0] += 1.0
    assert receiver.load(manifest) == manifest.weights_digest
    assert_equal(receiver.tensors, version(1))


def test_a_version_in_shards_is_announced_as_it_is_written(tmp_path: Path) -> None:
    folder, announced, ahead = RunFolder(tmp_path, "job"), [], []
    receiver = Store(FileWeights(), tmp_path).receiver()

    def announce(shard: WeightShard) -> None:
        """Lets the generator read each shard before the next one is written."""
        announced.append(shard.name)
        assert not folder.weights_of(1).exists()
        receiver.load_ahead(shard)
        ahead.append({name for name, tensor in receiver.tensors.items() if torch.equal(tensor, version(1)[name])})

    publisher = WholePublisher(FolderStore(folder, wait_s=60.0), announce=announce, shard_bytes=10_000)
    manifest = publish(publisher, version(1), policy_version=1)
    assert [file.name for file in manifest.files] == [f"weights-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert announced == ["weights-00001-of-00002.safetensors"]
    assert ahead == [{"embedding"}]
    whole = Store(FileWeights(), tmp_path / "whole").publish(1)
    assert receiver.load(manifest) == manifest.weights_digest == whole.weights_digest
    assert_equal(receiver.tensors, version(1))


def test_shards_of_a_version_that_was_written_anew_are_read_again(tmp_path: Path) -> None:
    store = Store(FileWeights(), tmp_path)
    receiver = store.receiver()
    first = WholePublisher(FolderStore(store.folder, wait_s=60.0), announce=receiver.load_ahead, shard_bytes=10_000)
    publish(first, version(2), policy_version=1)
    second = WholePublisher(FolderStore(store.folder, wait_s=60.0), announce=lambda _: None, shard_bytes=10_000)
    manifest = publish(second, version(1), policy_version=1)
    assert receiver.load(manifest) == manifest.weights_digest
    gone = WeightShard(policy_version=2, path="job/weights/.v000002.0/a.safetensors", name="a", num_bytes=1)
    receiver.load_ahead(gone)
    assert receiver.load(manifest) == manifest.weights_digest


def test_shards_hold_tensors_in_order() -> None:
    tensors = {"a": torch.zeros(6), "b": torch.zeros(2), "c": torch.zeros(2)}
    assert [list(shard) for shard in split_into_shards(layout_of(tensors), shard_bytes=16)] == [["a"], ["b", "c"]]


def test_publishing_again_writes_nothing_unless_the_content_differs(tmp_path: Path) -> None:
    store = Store(FileWeights(), tmp_path)
    first = store.publish(0)
    path = store.folder.run_root / first.directory / first.files[0].name
    inode = path.stat().st_ino
    assert store.publish(0) == first
    assert path.stat().st_ino == inode
    changed = store.publish(0, version(1))
    assert changed.weights_digest != first.weights_digest
    assert path.stat().st_ino != inode
    assert [entry.name for entry in store.folder.weights.iterdir()] == ["v000000"]


def test_what_killed_writers_and_removals_left_goes_before_the_next_version(store: Store) -> None:
    if isinstance(store.spec.weights, RedisWeights):
        return
    for name in (".v000001.0123456789ab", ".v000004.0123456789ab", ".v000001.0123456789ab.ba9876543210"):
        (store.folder.weights / name).mkdir(parents=True)
    store.publisher.store.clear_scratch()
    store.publish(2)
    assert [path.name for path in store.folder.weights.iterdir()] == ["v000002"]


def test_versions_of_a_future_that_was_rewound_go(store: Store) -> None:
    for number in range(4):
        store.publish(number)
    another = store.another_publisher()
    another.store.remove_after(1)
    if not isinstance(store.spec.weights, RedisWeights):
        assert store.versions_left() == [0, 1]
    publish(another, version(7), policy_version=1)
    manifest = publish(another, version(8), policy_version=2)
    receiver = store.receiver()
    assert receiver.load(manifest) == manifest.weights_digest


def test_in_a_weight_root_the_rest_of_other_jobs_ends_is_collected(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs", "job", weight_root=tmp_path / "memory")
    (tmp_path / "memory" / "job-that-ended" / ".weights.0123456789ab" / "v000009").mkdir(parents=True)
    WholePublisher(FolderStore(folder, wait_s=1.0), announce=lambda shard: None).store.clear_scratch()
    assert list((tmp_path / "memory" / "job-that-ended").iterdir()) == []


@pytest.mark.parametrize("transport", ["file", "delta"])
def test_a_folder_that_cannot_be_written_is_named_and_the_next_version_is_whole(tmp_path: Path, transport: str) -> None:
    store = Store(TRANSPORTS[transport], tmp_path)
    store.publish(0)
    kept = store.folder.weights.rename(tmp_path / "kept")
    store.folder.weights.write_text("in the way")
    with pytest.raises(OnbeatError, match="v000001: cannot write"):
        store.publish(1)
    store.folder.weights.unlink()
    kept.rename(store.folder.weights)
    manifest = store.publish(1)
    assert manifest.base == ()
    assert store.receiver().load(manifest) == manifest.weights_digest


def test_a_full_redis_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    store = Store(RedisWeights(), tmp_path)
    store.chunks.times_full = 3
    store.receiver().load(store.publish(0))
    assert len(store.pauses) == 3
    store.spec = job_spec(weights=RedisWeights(), timeouts__iteration_s=1e-9)
    store.publisher = store.another_publisher()
    store.chunks.times_full = 1
    with pytest.raises(DeadlineExceeded, match="room for weights in Redis"):
        store.publish(1)


def test_a_version_that_is_too_large_for_redis_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "MAX_VERSION_BYTES", 1000)
    with pytest.raises(InvalidInput, match=r"weights\.transport"):
        Store(RedisWeights(), tmp_path).publish(0)


def test_the_versions_that_a_lag_keeps_in_redis_share_the_room_of_those_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(RedisWeights(), tmp_path)
    num_bytes = store.publish(0).files[0].num_bytes
    monkeypatch.setattr(chunk_store, "MAX_VERSION_BYTES", num_bytes)
    store.publish(1)
    store.spec = job_spec(weights=RedisWeights(), schedule="delayed", max_policy_lag=2, algorithm__correction="tis")
    store.publisher = store.another_publisher()
    with pytest.raises(InvalidInput, match=r"weights\.transport: a version has .* MiB, Redis takes"):
        store.publish(2)
    monkeypatch.setattr(chunk_store, "MAX_VERSION_BYTES", 2 * num_bytes)
    store.publisher = store.another_publisher()
    store.publish(2)


def test_a_large_version_is_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_store, "CHUNK_BYTES", 1000)
    store = Store(RedisWeights(), tmp_path)
    manifest = store.publish(0)
    assert len(store.chunks.data) == -(-manifest.files[0].num_bytes // 1000)
    store.receiver().load(manifest)
    del store.chunks.data[0, manifest.files[0].name, 5]
    with pytest.raises(WeightsRejected, match="chunk 5 of version 0 is not in Redis"):
        store.receiver().load(manifest)


def test_tensors_of_the_same_bits_and_another_type_or_shape_are_not_the_same() -> None:
    zeros = torch.zeros(2, 3)
    assert are_same(zeros, torch.zeros(2, 3))
    assert not are_same(zeros, torch.zeros(2, 3, dtype=torch.int32))
    assert not are_same(zeros, torch.zeros(3, 2))


def test_there_is_nothing_to_remove_where_nothing_was_published(tmp_path: Path) -> None:
    WholePublisher(FolderStore(RunFolder(tmp_path, "job"), wait_s=1.0), announce=lambda shard: None).remove_before(3)
    assert list(tmp_path.iterdir()) == []


def test_an_engines_tensors_in_host_memory_are_written_in_place(tmp_path: Path) -> None:
    whole, strided = torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]
    receiver = WeightReceiver({"whole": whole, "strided": strided}, make_stores(tmp_path))
    assert receiver.tensors["whole"].data_ptr() == whole.data_ptr()
    assert receiver.tensors["strided"].data_ptr() != strided.data_ptr()
