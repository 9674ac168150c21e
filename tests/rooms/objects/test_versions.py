"""Versions in an object store keep what every store of versions promises, and what a bucket makes harder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from contracts.encoding.digests import content_digest
from contracts.errors import InvalidInput, ObjectsUnavailable, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest, WeightShard
from contracts.weights import ObjectWeights
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.delta.publisher import DeltaPublisher
from onbeat.weights.held_versions import HeldVersions
from onbeat.weights.layout import layout_of
from onbeat.weights.objects import blobs as blobs_module
from onbeat.weights.objects import versions as versions_module
from onbeat.weights.objects.versions import ObjectVersions, digest_in
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.receiver import PublishedVersions, WeightReceiver
from onbeat.weights.transports import make_publisher, make_stores
from onbeat.weights.whole import WholePublisher
from producer.engine.vllm.engine import VllmEngine
from producer.engine.vllm.extension import stores_of_core
from tests.builders import job_spec
from tests.publishing import given_by, publish
from tests.rooms.objects.s3_server import FaultyProxy
from tests.unit.onbeat.weights.adapter.test_adapters import SCALING, base, matrices, merged
from tests.unit.onbeat.weights.test_weight_store import (  # noqa: F401 - the tests of every store, with `store` of here
    FakeChunks,
    assert_equal,
    test_a_damaged_version_is_refused_until_it_is_repaired,
    test_a_receiver_that_joins_late_or_missed_some_gets_the_same_tensors,
    test_a_trainer_that_takes_over_publishes_the_same_digest,
    test_a_version_of_another_model_is_refused_by_the_tensor,
    test_every_version_arrives_bit_for_bit_with_the_digest_of_its_values,
    test_old_versions_go_but_for_those_that_newer_ones_or_generators_need,
    test_versions_of_a_future_that_was_rewound_go,
    test_what_a_claim_named_before_a_trainer_took_over_can_be_loaded_after,
    version,
)

Tensors = dict[str, Tensor]
WHOLE_ALONE = pytest.mark.parametrize("store", [1], ids=["whole"], indirect=True)
DELTAS_ALONE = pytest.mark.parametrize("store", [4], ids=["delta"], indirect=True)


class Store:
    """As that of tests/unit/onbeat/weights/test_weight_store.py: a trainer's and generators' processes share a folder
    of objects, and no other."""

    def __init__(self, root: Path, weights: ObjectWeights) -> None:
        self.spec: JobSpec = job_spec(weights=weights)
        self.objects = root / "objects"
        self.settings = StackSettings(objects=f"file://{self.objects}", run_root=str(root / "runs"))
        self.announced: list[WeightShard] = []
        self.folder = RunFolder(self.settings.run_root_path, "job")
        self.publisher = self.another_publisher()

    def another_publisher(self, adapters: AdapterSource | None = None) -> WeightPublisher:
        return make_publisher(
            self.spec,
            self.folder,
            chunks=FakeChunks(),
            announce=self.announced.append,
            pause=lambda _: None,
            settings=self.settings,
            adapters=adapters,
        )

    def versions_of(self, **changes: object) -> ObjectVersions:
        """The trainer's side alone. changes: of the settings."""
        return ObjectVersions(self.spec, self.folder, pause=lambda _: None, settings=replace(self.settings, **changes))

    def receiver(self, like: Mapping[str, Tensor] | None = None) -> WeightReceiver:
        targets = {name: torch.zeros_like(tensor) for name, tensor in (like or version(0)).items()}
        return WeightReceiver(targets, make_stores(Path("/nowhere"), None, self.settings))

    def publish(self, number: int, tensors: Tensors | None = None) -> WeightManifest:
        return publish(self.publisher, version(number) if tensors is None else tensors, policy_version=number)

    def damage(self, manifest: WeightManifest, spoil: Callable[[bytes], bytes | None]) -> None:
        path = self.objects / "job" / "weights" / digest_in(manifest.files[0].name)
        spoilt = spoil(path.read_bytes())
        path.unlink()
        if spoilt is not None:
            path.write_bytes(spoilt)

    def versions_left(self) -> list[int]:
        assert self.blobs() == self.listed()
        return sorted(int(path.name[1:7]) for path in (self.objects / "job" / "versions").glob("v*"))

    def blobs(self) -> set[str]:
        return {path.name for path in (self.objects / "job" / "weights").glob("*")}

    def listed(self) -> set[str]:
        return ObjectVersions._listed(self.versions_of())


@pytest.fixture(params=[1, 4], ids=["whole", "delta"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Receivers of each kind of version read from the same objects."""
    return Store(tmp_path, ObjectWeights(snapshot_every_versions=request.param))


def test_a_version_leaves_nothing_in_a_folder_and_at_the_end_nothing_in_the_store(store: Store) -> None:
    manifest = store.publish(3)
    assert (manifest.transport, manifest.directory) == ("object", "job/weights/v000003")
    store.receiver().load(manifest)
    assert not store.folder.run_root.exists()
    store.publisher.store.remove_all()
    assert [path for path in store.objects.rglob("*") if path.is_file()] == []
    store.publisher.store.remove_all()


def test_a_shard_is_announced_once_it_is_there_and_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver, ahead, reads = store.receiver(), [], []
    get = blobs_module.Blobs.get
    monkeypatch.setattr(blobs_module.Blobs, "get", lambda *given, **how: reads.append(given[1]) or get(*given, **how))

    def announce(shard: WeightShard) -> None:
        receiver.load_ahead(shard)
        ahead.append({name for name, tensor in receiver.tensors.items() if torch.equal(tensor, version(1)[name])})

    publisher = WholePublisher(store.versions_of(), announce=announce, shard_bytes=10_000)
    manifest = publish(publisher, version(1), policy_version=1)
    assert len(manifest.files) == 2
    assert ahead == [{"embedding"}]
    assert receiver.load(manifest) == manifest.weights_digest
    assert_equal(receiver.tensors, version(1))
    assert reads == [digest_in(file.name) for file in manifest.files], "a shard was read twice"


@WHOLE_ALONE
@pytest.mark.parametrize("most_bytes", [0, 1])
def test_versions_stay_at_the_end_of_a_job_that_records_with_its_versions(store: Store, most_bytes: int) -> None:
    store.spec = job_spec(weights=ObjectWeights(), recording={"max_version_bytes": most_bytes})
    store.publisher = store.another_publisher()
    manifest = store.publish(3)
    store.publisher.store.remove_all()
    assert store.blobs() == {digest_in(file.name) for file in manifest.files if most_bytes}


@DELTAS_ALONE
def test_a_delta_of_a_hundredth_is_a_fraction_of_the_version_and_is_announced_by_parts(store: Store) -> None:
    receiver = store.receiver()
    assert isinstance(store.spec.weights, ObjectWeights)
    publisher = DeltaPublisher(
        store.spec.weights, store.versions_of(), announce=store.announced.append, delta_shard_bytes=10_000
    )
    whole, delta = (publish(publisher, version(number), policy_version=number) for number in (0, 1))
    assert (delta.transport, delta.base) == ("object", whole.steps)
    assert sum(file.num_bytes for file in delta.files) < 0.1 * whole.files[0].num_bytes
    (shard,) = store.announced
    receiver.load(whole)
    receiver.load_ahead(shard)
    assert receiver.load(delta) == delta.weights_digest
    assert_equal(receiver.tensors, version(1))


@DELTAS_ALONE
def test_an_engine_core_is_handed_no_deltas(store: Store) -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._stores = make_stores(Path("/nowhere"), None, store.settings)
    store.publish(0)
    with pytest.raises(
        InvalidInput, match=r"weights\.snapshot_every_versions: .* follows no deltas in the object store"
    ):
        engine._files_elsewhere(store.publish(1))


@DELTAS_ALONE
def test_a_whole_version_in_the_place_of_a_delta_is_the_one_that_was_written_last(store: Store) -> None:
    first = store.publish(0)
    manifest = store.publish(1)
    store.damage(manifest, lambda _: None)
    publish(store.publisher, version(1), policy_version=1, is_again=True)
    lists = store.objects / "job" / "versions"
    (lists / "v000001.more.whole").write_text('[{"name": "../../key", "num_bytes": 1}]')
    with pytest.raises(WeightsRejected, match="version 1 is not in the object store"):
        store.receiver().load(manifest)
    # A trainer that is told so writes it again.
    publish(store.publisher, version(1), policy_version=1, is_again=True)
    joined = store.receiver()
    assert joined.load(manifest) == manifest.weights_digest
    goes_on = store.receiver()
    goes_on.load(first)
    assert goes_on.load(manifest) == manifest.weights_digest


@WHOLE_ALONE
def test_adapters_travel_with_their_base_which_stays(store: Store) -> None:
    def publisher() -> WeightPublisher:
        source = AdapterSource(scaling=SCALING, matrices=lambda: matrices(2), base=given_by(base))
        return store.another_publisher(source)

    store.publisher = publisher()
    manifests = [publish(store.publisher, merged(2), policy_version=number) for number in (2, 3)]
    store.publisher.remove_before(3)
    store.publisher = publisher()
    again = publish(store.publisher, merged(2), policy_version=3)
    assert again == manifests[1]
    store.publisher.remove_before(3)
    held = HeldVersions(
        {name: torch.zeros_like(one) for name, one in base().items()},
        make_stores(Path("/nowhere"), None, store.settings),
    )
    assert held.load(again) == again.weights_digest


def test_an_engine_core_is_handed_whole_versions_and_no_base_of_adapters(store: Store) -> None:
    engine = VllmEngine.__new__(VllmEngine)
    engine._stores = make_stores(Path("/nowhere"), None, store.settings)
    manifest = store.publish(1)
    handed = engine._files_elsewhere(manifest)
    targets = {name: torch.zeros_like(tensor) for name, tensor in version(0).items()}
    core = WeightReceiver(targets, stores_of_core(Path("/nowhere"), lambda: handed))
    assert core.load(manifest) == manifest.weights_digest
    source = AdapterSource(scaling=SCALING, matrices=lambda: matrices(2), base=given_by(base))
    adapters = publish(store.another_publisher(source), merged(2), policy_version=2)
    with pytest.raises(
        InvalidInput, match=r"trainer\.lora\.publish: .* reads no base of adapters from the object store"
    ):
        engine._files_elsewhere(adapters)


@WHOLE_ALONE
def test_versions_that_share_bytes_keep_them_until_the_last_one_goes(store: Store) -> None:
    first, second = store.publish(1), store.publish(2, version(1))
    assert first.files == second.files
    store.publisher.remove_before(2)
    store.receiver().load(second)
    store.publisher.remove_before(3)
    assert store.blobs() == set()


def test_what_a_killed_trainer_left_goes_once_it_is_old_and_what_is_listed_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = store.versions_of()
    left = killed.send(memoryview(b"a shard of a version that never was whole"), again=False)
    manifest = store.publish(1)
    successor = store.another_publisher()
    successor.store.clear_scratch()
    assert left in store.blobs()
    monkeypatch.setattr(versions_module, "ABANDONED_S", -60.0)
    store.another_publisher().store.clear_scratch()
    assert store.blobs() == {digest_in(file.name) for file in manifest.files}
    store.receiver().load(manifest)


def test_a_version_that_is_given_up_takes_back_what_no_other_one_has(store: Store) -> None:
    publisher = WholePublisher(store.versions_of(), announce=lambda _: None, shard_bytes=10_000)
    whole = publish(publisher, version(1), policy_version=1)
    tensors = {"embedding": version(1)["embedding"], "more": torch.ones(5000), "last": torch.ones(2)}
    with publisher.begin(layout_of(tensors), policy_version=2) as publication:
        for name in ("embedding", "more"):
            publication.add(name, tensors[name])
    assert store.blobs() == {digest_in(file.name) for file in whole.files}


def test_a_trainer_overwrites_nothing_of_another_one_that_it_does_not_know_of(store: Store) -> None:
    one, other = store.another_publisher(), store.another_publisher()
    manifests = [publish(one, version(1), policy_version=1), publish(other, version(2), policy_version=1)]
    for manifest, number in zip(manifests, (1, 2), strict=True):
        receiver = store.receiver()
        assert receiver.load(manifest) == manifest.weights_digest
        assert_equal(receiver.tensors, version(number))


def test_a_checkpoint_takes_an_older_version_from_the_store(store: Store, tmp_path: Path) -> None:
    manifest = store.publish(1)
    stores = make_stores(Path("/nowhere"), None, store.settings)
    (older,) = PublishedVersions(layout_of(version(0)), stores).save([manifest], tmp_path)
    assert (older.policy_version, older.weights_digest) == (1, manifest.weights_digest)


def test_another_stores_file_and_one_that_is_away_say_what_they_are(
    store: Store, proxy: FaultyProxy, settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.publish(1)
    foreign = replace(manifest, files=(replace(manifest.files[0], name="weights-00001-of-00001.safetensors"),))
    with pytest.raises(WeightsRejected, match=r"isn't in the object store: .*no digest in its name"):
        store.receiver().load(foreign)
    absent = replace(manifest.files[0], name=f"weights.{content_digest(b'none')}.safetensors")
    with pytest.raises(WeightsRejected, match="version 1 is not in the object store"):
        store.receiver().load(replace(manifest, files=(absent,)))
    monkeypatch.setattr(versions_module, "RECEIVER_S", 0.3)
    proxy.refuse = lambda method, path: 503
    store.settings = settings
    receiver = store.receiver()
    with pytest.raises(ObjectsUnavailable, match="for the object store to give"):
        receiver.load(manifest)
    receiver.load_ahead(WeightShard(policy_version=2, path=f"job/weights/v000002/{absent.name}", name="a", num_bytes=1))


def test_a_job_ends_also_where_the_store_keeps_its_versions(
    store: Store,
    proxy: FaultyProxy,
    settings: StackSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(versions_module, "LAST_S", 0.3)
    store.settings = settings
    publisher = store.another_publisher()
    proxy.refuse = lambda method, path: 503
    publisher.store.remove_all()
    assert "the versions of job job stay in the object store" in caplog.text


def test_a_process_without_the_setting_of_a_store_names_it(store: Store) -> None:
    manifest = store.publish(1)
    store.settings = replace(store.settings, objects="")
    with pytest.raises(InvalidInput, match="ONBEAT_OBJECTS: no object store is named"):
        store.another_publisher()
    with pytest.raises(InvalidInput, match="ONBEAT_OBJECTS: no object store is named"):
        store.receiver().load(manifest)


def test_a_process_without_obstore_names_the_extra_once_it_is_needed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.publish(1)
    for module in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, module, None)
    for needs_obstore in (store.another_publisher, lambda: store.receiver().load(manifest)):
        with pytest.raises(InvalidInput, match=r'ONBEAT_OBJECTS: needs obstore \(pip install "onbeat\[objects\]"'):
            needs_obstore()


def test_a_trainer_reads_back_what_the_store_has_and_not_what_its_host_keeps(store: Store, tmp_path: Path) -> None:
    store.settings = replace(store.settings, cache=str(tmp_path / "cache"))
    store.publisher = store.another_publisher()
    manifest = store.publish(1)
    store.damage(manifest, lambda _: None)
    store.receiver().load(manifest)
    stores = make_stores(Path("/nowhere"), None, replace(store.settings, cache=""))
    with pytest.raises(WeightsRejected, match="version 1 is not in the object store"):
        PublishedVersions(layout_of(version(0)), stores).check(manifest)
