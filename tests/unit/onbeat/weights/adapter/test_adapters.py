"""Versions that travel as adapters: little is sent, and the weights and digest are those of the merged version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.run_folder import RunFolder
from contracts.versions import WeightManifest
from contracts.weights import FileWeights, RedisWeights, WeightsSpec
from onbeat.weights.adapter.matrices import AdapterSource, matrix_names, merge_into
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.held_versions import HeldVersions
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.receiver import WeightReceiver
from onbeat.weights.transports import make_publisher, make_stores
from tests.builders import job_spec
from tests.publishing import given_by, publish
from tests.unit.onbeat.weights.test_weight_store import FakeChunks, flip_a_bit

LAYERS = {"one": (400, 90), "two.proj": (30, 500)}
RANK = 3
SCALING = 1.5
Tensors = dict[str, Tensor]


def base(seed: int = 0) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    layers = {f"{name}.weight": torch.randn(shape, generator=draw).bfloat16() for name, shape in LAYERS.items()}
    return {"embedding": torch.randn(80, 20, generator=draw).bfloat16(), **layers, "steps": torch.tensor(7)}


def matrices(number: int, layers: dict[str, tuple[int, int]] = LAYERS) -> Tensors:
    """Random adapters; those of version 0 have B = 0, as peft makes them."""
    draw = torch.Generator().manual_seed(100 + number)
    tensors: Tensors = {}
    for name, (out, inner) in layers.items():
        name_a, name_b = matrix_names(name)
        tensors[name_a] = torch.randn(RANK, inner, generator=draw)
        tensors[name_b] = torch.randn(out, RANK, generator=draw) * (number > 0)
    return tensors


def merged(number: int, layers: dict[str, tuple[int, int]] = LAYERS) -> Tensors:
    tensors, adapters = base(), matrices(number, layers)
    for name in layers:
        name_a, name_b = matrix_names(name)
        weight = tensors[f"{name}.weight"]
        merge_into(weight, weight, lora_a=adapters[name_a], lora_b=adapters[name_b], scaling=SCALING)
    return tensors


class Store:
    """A publisher of adapters over one transport, and receivers of what it publishes."""

    def __init__(self, weights: WeightsSpec, root: Path) -> None:
        self.chunks = FakeChunks()
        self.folder = RunFolder(root, "job")
        self._spec = job_spec(weights=weights)
        self._matrices: Tensors = {}
        self.base: Callable[[], Mapping[str, Tensor]] = base
        self.publisher = self.another_publisher()

    def another_publisher(self) -> WeightPublisher:
        """The publisher of a trainer that takes over."""
        return make_publisher(
            self._spec,
            self.folder,
            chunks=self.chunks,
            announce=lambda shard: None,
            pause=lambda seconds: None,
            adapters=AdapterSource(scaling=SCALING, matrices=lambda: self._matrices, base=given_by(self.base)),
        )

    def publish(self, number: int, layers: dict[str, tuple[int, int]] = LAYERS) -> WeightManifest:
        self._matrices = matrices(number, layers)
        return publish(self.publisher, merged(number, layers), policy_version=number)

    def receiver(self) -> WeightReceiver:
        targets = {name: torch.zeros_like(tensor) for name, tensor in base().items()}
        return WeightReceiver(targets, make_stores(self.folder.weight_root, lambda job_id: self.chunks))

    def base_file(self) -> Path:
        return next(self.folder.weights.glob("base/*.safetensors"))


@pytest.fixture(params=[FileWeights(), RedisWeights()], ids=["file", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(request.param, tmp_path)


@pytest.fixture
def files(tmp_path: Path) -> Store:
    return Store(FileWeights(), tmp_path)


def holds(receiver: WeightReceiver, expected: Tensors) -> bool:
    return all(torch.equal(tensor, expected[name]) for name, tensor in receiver.tensors.items())


def test_a_receiver_holds_the_merged_weights_bit_for_bit_whichever_versions_it_saw(store: Store) -> None:
    steady = store.receiver()
    for number in (0, 1, 2, 4):
        manifest = store.publish(number)
        assert manifest.weights_digest == tensors_digest(merged(number))
        for receiver in (steady, store.receiver()):
            assert receiver.load(manifest) == manifest.weights_digest
            assert holds(receiver, merged(number))
    assert not holds(steady, merged(2))


def test_a_version_brings_the_adapters_alone_and_the_base_comes_once(files: Store) -> None:
    first, second = files.publish(0), files.publish(1)
    written = files.base_file().stat().st_mtime_ns
    num_bytes = sum(tensor.nbytes for tensor in matrices(1).values())
    assert num_bytes <= sum(file.num_bytes for file in second.files) < num_bytes + 1000
    assert first.adapter is not None
    assert second.adapter is not None
    assert first.adapter.base == second.adapter.base
    receiver = files.receiver()
    receiver.load(first)
    files.base_file().rename(files.folder.weights / "away")
    assert receiver.load(second) == second.weights_digest
    (files.folder.weights / "away").rename(files.folder.weights / "base" / "weights-00001-of-00001.safetensors")
    publish(files.another_publisher(), merged(1), policy_version=1)
    assert files.base_file().stat().st_mtime_ns == written


class Gathered(Mapping[str, Tensor]):
    """Tensors that ranks share: each request is a collective of all of them."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_each_tensor_of_the_base_is_asked_for_once_whether_it_is_there_or_not(files: Store) -> None:
    for _ in range(2):
        gathered = Gathered(base())
        files.base = lambda tensors=gathered: tensors
        files.publisher = files.another_publisher()
        manifest = files.publish(1)
        assert gathered.asked == list(base())
        assert files.receiver().load(manifest) == manifest.weights_digest


def test_other_layers_and_whole_versions_in_between_are_not_taken_for_the_base(files: Store) -> None:
    receiver = files.receiver()
    receiver.load(files.publish(1))
    only_one = {"one": LAYERS["one"]}
    assert receiver.load(files.publish(2, only_one))
    assert holds(receiver, merged(2, only_one))
    spec = job_spec()
    whole = make_publisher(
        spec, files.folder, chunks=files.chunks, announce=lambda shard: None, pause=lambda seconds: None
    )
    receiver.load(publish(whole, base(seed=9), policy_version=3))
    assert holds(receiver, base(seed=9))
    receiver.load(files.publish(4))
    assert holds(receiver, merged(4))


@pytest.mark.parametrize("spoil", [flip_a_bit, lambda data: data[:-1], None], ids=["flipped", "shortened", "missing"])
@pytest.mark.parametrize("what", ["base", "v000001"])
def test_damaged_adapters_and_a_damaged_base_are_refused_until_they_are_repaired(
    files: Store, spoil: Callable[[bytes], bytes] | None, what: str
) -> None:
    manifest, receiver = files.publish(1), files.receiver()
    path = next((files.folder.weights / what).glob("*.safetensors"))
    if spoil is None:
        path.unlink()
    else:
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(WeightsRejected):
        receiver.load(manifest)
    publish(files.publisher, merged(1), policy_version=1, is_again=True)
    assert receiver.load(manifest) == manifest.weights_digest
    assert holds(receiver, merged(1))


def test_a_merge_that_is_not_the_trainers_is_refused(files: Store) -> None:
    """Publishes as a trainer with other arithmetic: the matrices are whole, but merged they aren't the version."""
    manifest = files.publish(1)
    other = merged(1)
    other["one.weight"][0, 0] += 0.5
    claimed = publish(files.publisher, other, policy_version=1)
    with pytest.raises(WeightsRejected, match="was loaded with digest"):
        files.receiver().load(claimed)
    assert files.receiver().load(manifest) == manifest.weights_digest


def spoilt_pairs() -> dict[str, Tensors]:
    name_a, name_b = matrix_names("one")
    good = matrices(1)
    return {
        "no B": {name: tensor for name, tensor in good.items() if name != name_b},
        "another shape": good | {name_b: torch.ones(401, RANK)},
        "bfloat16": good | {name_a: good[name_a].bfloat16()},
        "unknown layer": good
        | {matrix_names("nine")[0]: torch.ones(RANK, 4), matrix_names("nine")[1]: torch.ones(4, RANK)},
        "none": {"one.weight": torch.ones(2, 2)},
    }


@pytest.mark.parametrize("what", spoilt_pairs())
def test_what_is_no_adapter_of_the_model_is_refused(files: Store, what: str) -> None:
    files._matrices = spoilt_pairs()[what]
    manifest = publish(files.publisher, merged(1), policy_version=1)
    with pytest.raises(WeightsRejected, match=r"no adapter of this model|pairs of LoRA matrices"):
        files.receiver().load(manifest)


def test_old_adapters_go_and_their_base_stays_until_the_end(tmp_path: Path) -> None:
    store = Store(FileWeights(), tmp_path)
    for number in range(4):
        store.publish(number)
    store.publisher.remove_before(3)
    assert sorted(path.name for path in store.folder.weights.iterdir()) == ["base", "v000003"]


@pytest.mark.parametrize("weights", [FileWeights(), RedisWeights()], ids=["file", "redis"])
def test_nothing_is_left_outside_the_run_folder(tmp_path: Path, weights: WeightsSpec) -> None:
    store = Store(weights, tmp_path)
    store.folder = RunFolder(tmp_path, "job", weight_root=tmp_path / "memory")
    store.publisher = store.another_publisher()
    store.publish(1)
    assert store.base_file().is_relative_to(tmp_path / "memory")
    store.publisher.store.remove_all()
    assert list((tmp_path / "memory").rglob("*.safetensors")) == []
    assert store.chunks.data == {}


def test_adapters_that_are_not_those_of_their_manifest_are_refused_before_they_are_merged(files: Store) -> None:
    manifest = files.publish(1)
    assert manifest.adapter is not None
    forged = replace(manifest, adapter=replace(manifest.adapter, adapter_digest="f" * 64))
    receiver = files.receiver()
    with pytest.raises(WeightsRejected, match="the adapters of version 1 have digest"):
        receiver.load(forged)
    assert receiver.load(manifest) == manifest.weights_digest


def test_an_engine_that_reads_no_redis_says_which_transport_it_reads(tmp_path: Path) -> None:
    store = Store(RedisWeights(), tmp_path)
    manifest = store.publish(1)
    receiver = WeightReceiver(base(), make_stores(tmp_path))
    with pytest.raises(WeightsRejected, match="is in Redis, which this engine does not read"):
        receiver.load(manifest)


def test_versions_are_merged_beside_the_one_in_use_into_a_base_that_is_read_once_for_each_memory(store: Store) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in base().items()}
    versions = HeldVersions(
        targets, make_stores(store.folder.weight_root, lambda job_id: store.chunks), beside_bytes=2**30
    )
    manifests = [store.publish(number) for number in range(7)]
    versions.load(manifests[0])
    for number in range(1, 7):
        while versions.receive(manifests[number - 1 : number + 2], num_versions=3):
            assert all(torch.equal(targets[name], tensor) for name, tensor in merged(number - 1).items())
        if number == 3:
            # All three memories hold it by now.
            store.base_file().unlink()
        assert versions.load(manifests[number]) == manifests[number].weights_digest
        assert all(torch.equal(targets[name], tensor) for name, tensor in merged(number).items())
