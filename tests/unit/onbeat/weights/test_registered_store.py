"""A store of versions that no package knows: registered here, it is published to, loaded from, audited and exported."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

import producer.engine.transformers.engine as transformers_engine
from contracts.encoding.digests import content_digest
from contracts.engines import TransformersOptions
from contracts.errors import InvalidInput, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightFile, WeightManifest, WeightTransport
from contracts.weights import TRANSPORTS, Transport, WeightsSpec
from gateway.submission import check_generators
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process.own_packages import PACKAGES
from onbeat.recording.files import folders_of, why_not_again
from onbeat.stack.profile import load_profile
from onbeat.weights.adapter.matrices import AdapterSource
from onbeat.weights.held_versions import HeldVersions
from onbeat.weights.layout import PendingVersion, layout_of
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.receiver import PublishedVersions, WeightReceiver
from onbeat.weights.stores import CopiedFiles, Stores, VersionFile, VersionFiles
from onbeat.weights.transports import STORES, ChunksOf, Store, StoreNeeds, make_publisher, make_stores
from producer.engine.base import EngineSetup
from producer.engine.factory import make_engine
from tests.builders import job_spec
from tests.contract.golden_files import golden
from tests.publishing import given_by, publish
from tests.rooms.runs.test_export import are_same, loaded, make_run
from tests.unit.gateway.test_submission import generators
from tests.unit.onbeat.weights.adapter.test_adapters import SCALING, base, matrices, merged
from tests.unit.onbeat.weights.test_weight_store import assert_equal, version

ROOT = Path(__file__).parents[4]


class CrateWeights(Transport, tag="crate", frozen=True, kw_only=True):
    """Files that are named by their content, in one folder of the process's settings."""

    elsewhere: ClassVar[str] = "a crate"


class CrateFile:
    """A FileWriter."""

    def __init__(self, num_bytes: int) -> None:
        self.data = bytearray(num_bytes)

    def write_at(self, data: memoryview, start: int) -> None:
        self.data[start : start + len(data)] = data

    def close(self) -> None:
        """Nothing: `put_in_place` writes them all."""


class CrateVersion:
    """A VersionWriter."""

    transport = "crate"
    holds_whole = False

    def __init__(self, crate: Path, index: Path) -> None:
        self.crate, self.index = crate, index
        self.written: list[CrateFile] = []

    def stored(self) -> Mapping[str, Tensor]:
        return {}

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > 2**30:
            raise InvalidInput("too large for a crate", field="weights.transport")

    def open(self, name: str, num_bytes: int) -> CrateFile:
        self.written.append(CrateFile(num_bytes))
        return self.written[-1]

    def early_path(self, name: str) -> None:
        return None

    def put_in_place(self) -> tuple[WeightFile, ...]:
        names = [f"{content_digest(bytes(file.data))}.safetensors" for file in self.written]
        for name, file in zip(names, self.written, strict=True):
            (self.crate / name).write_bytes(file.data)
        self.index.parent.mkdir(parents=True, exist_ok=True)
        self.index.write_text("\n".join(names))
        return tuple(
            WeightFile(name=name, num_bytes=len(file.data)) for name, file in zip(names, self.written, strict=True)
        )

    def discard(self) -> None:
        self.written.clear()


class CrateStore:
    """A VersionStore: the crate, and for each version a list of its files."""

    def __init__(self, needs: StoreNeeds) -> None:
        self.folder = needs.folder
        self.wait_s = needs.spec.timeouts.iteration_s
        self.bases = self
        self.crate = crate_of(needs.settings)
        self.crate.mkdir(parents=True, exist_ok=True)

    def begin(self, version: PendingVersion) -> CrateVersion:
        return CrateVersion(self.crate, self.crate / "index" / version.directory)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        index = self.crate / "index"
        for path in index.glob(f"{self.folder.job_id}/weights/v*"):
            if int(path.name[1:]) < policy_version and str(path.relative_to(index)) not in in_use:
                path.unlink()
        listed = {name for path in index.rglob("*") if path.is_file() for name in path.read_text().split()}
        for path in self.crate.glob("*.safetensors"):
            if path.name not in listed:
                path.unlink()

    def remove_after(self, policy_version: int) -> None: ...

    def clear_scratch(self) -> None: ...

    def remove_all(self) -> None:
        self.remove_before(10**9)


class CrateFiles(CopiedFiles):
    """A VersionFiles that has whatever else it stands on in the crate, too."""

    def __init__(self, crate: Path) -> None:
        super().__init__("a crate", lambda file: read(crate, file), bases=self)


def read(crate: Path, file: VersionFile) -> bytes:
    try:
        return (crate / file.name).read_bytes()
    except OSError as error:
        raise WeightsRejected(f"version {file.policy_version} is not in the crate") from error


def crate_of(settings: StackSettings) -> Path:
    return settings.run_root_path / "crate"


def crate_files(root: Path, chunks: ChunksOf | None, settings: StackSettings) -> VersionFiles:
    return CrateFiles(crate_of(settings))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one line in the table; the other entry is of itself once `WeightsSpec` names the record."""
    monkeypatch.setitem(STORES, "crate", Store(trainer=CrateStore, receiver=crate_files))  # type: ignore[arg-type]
    monkeypatch.setitem(TRANSPORTS, "crate", CrateWeights)


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    return StackSettings(run_root=str(tmp_path / "runs"))


def crate_spec(**changes: object) -> JobSpec:
    return replace(job_spec(**changes), weights=CrateWeights())


def publisher_of(spec: JobSpec, settings: StackSettings, adapters: AdapterSource | None = None) -> WeightPublisher:
    return make_publisher(
        spec,
        RunFolder(settings.run_root_path, "job-1"),
        chunks=None,  # type: ignore[arg-type]
        announce=lambda _: pytest.fail("nothing is announced early"),
        pause=lambda _: None,
        settings=settings,
        adapters=adapters,
    )


def stores_of(settings: StackSettings) -> Stores:
    return make_stores(settings.weight_root_path, None, settings)


def targets(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def manifest_of(settings: StackSettings, number: int = 1) -> WeightManifest:
    return publish(publisher_of(crate_spec(), settings), version(number), policy_version=number)


def test_versions_are_published_loaded_and_removed(settings: StackSettings) -> None:
    publisher = publisher_of(crate_spec(), settings)
    manifests = [publish(publisher, version(number), policy_version=number) for number in range(3)]
    receiver = WeightReceiver(targets(version(0)), stores_of(settings))
    for number, manifest in enumerate(manifests):
        assert manifest.transport == "crate"
        assert receiver.load(manifest) == manifest.weights_digest
        assert_equal(receiver.tensors, version(number))
    publisher.remove_before(2, in_use=[manifests[0].directory])
    receiver.load(manifests[0])
    with pytest.raises(WeightsRejected, match="version 1 is not in the crate"):
        receiver.load(manifests[1])
    assert not RunFolder(settings.run_root_path, "job-1").weights.exists()


def test_a_damaged_file_is_refused_by_its_digest_and_a_short_one_by_its_size(settings: StackSettings) -> None:
    manifest = manifest_of(settings)
    path = crate_of(settings) / manifest.files[0].name
    data = path.read_bytes()
    receiver = WeightReceiver(targets(version(0)), stores_of(settings))
    for spoilt, reason in ((data[:-1] + bytes([data[-1] ^ 1]), "digest"), (data[:-1], "bytes in a crate")):
        path.write_bytes(spoilt)
        with pytest.raises(WeightsRejected, match=reason):
            receiver.load(manifest)


def test_adapters_travel_in_it_with_their_base(settings: StackSettings) -> None:
    source = AdapterSource(scaling=SCALING, matrices=lambda: matrices(2), base=given_by(base))
    manifest = publish(publisher_of(crate_spec(), settings, source), merged(2), policy_version=2)
    assert manifest.adapter is not None
    held = HeldVersions(targets(base()), stores_of(settings))
    assert held.load(manifest) == manifest.weights_digest
    assert not RunFolder(settings.run_root_path, "job-1").weights.exists()


def test_an_older_version_goes_into_a_checkpoint_and_the_audit_hashes_it_there(settings: StackSettings) -> None:
    folder, manifest = RunFolder(settings.run_root_path, "job-1"), manifest_of(settings)
    checkpoint = folder.checkpoint_after(1)
    checkpoint.mkdir(parents=True)
    (older,) = PublishedVersions(layout_of(version(0)), stores_of(settings)).save([manifest], checkpoint)
    (checkpoint / older.file).rename(checkpoint / "model.safetensors")
    assert digests_on_disk(folder) == {folder.relative(checkpoint): (2, manifest.weights_digest)}


def test_a_job_whose_versions_are_in_it_is_exported_from_its_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.spec = replace(run.spec, weights=CrateWeights())
    run.publisher = publisher_of(run.spec, StackSettings(run_root=str(tmp_path / "runs")))
    tensors = run.train(1)
    assert publish(run.publisher, tensors, policy_version=1).weights_digest == run.digests[1]
    run.save(1)
    assert run.export(tmp_path / "out").weights_digest == run.digests[1]
    assert are_same(loaded(tmp_path / "out"), tensors)


def test_what_only_a_process_with_an_account_reads_is_refused_where_a_server_would_read_it(tmp_path: Path) -> None:
    spec = crate_spec(deterministic=False)
    profile = tmp_path / "profile.toml"
    profile.write_text("[[generators]]\nengine = { type = 'openai', url = 'http://host:1' }")
    with pytest.raises(InvalidInput, match="reads files, not a crate"):
        load_profile(profile).check(spec)
    with pytest.raises(InvalidInput, match="reads files, not a crate"):
        check_generators(spec, generators("openai"))


def test_the_settings_of_a_generator_reach_the_store(settings: StackSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    setups: list[EngineSetup] = []
    monkeypatch.setattr(transformers_engine, "TransformersEngine", lambda setup, options: setups.append(setup))
    make_engine(job_spec().model, options=TransformersOptions(), settings=settings, deterministic=False, chunks=None)
    manifest = manifest_of(settings)
    assert WeightReceiver(targets(version(0)), setups[0].stores).load(manifest) == manifest.weights_digest


def test_its_versions_are_kept_for_a_recording_and_take_no_room_in_redis(settings: StackSettings) -> None:
    manifest = manifest_of(settings)
    assert manifest.num_chunk_bytes == 0
    assert folders_of([manifest]) == {manifest.directory: sum(file.num_bytes for file in manifest.files)}
    record: Any = replace(golden("RecordedBatch"), manifest=manifest)  # type: ignore[type-var]
    assert why_not_again(record, job_spec(), settings.weight_root_path) == ""


def test_one_line_of_the_contracts_is_closed_the_union_that_every_name_is_made_of() -> None:
    tags = tuple(str(kind.__struct_config__.tag) for kind in get_args(WeightsSpec))
    assert tags == get_args(WeightTransport)
    assert set(tags) | {"crate"} == set(TRANSPORTS) == set(STORES)


def asks_for_a_name(node: ast.AST) -> bool:
    """Whether code compares a transport with a name, or asks which record a spec's `weights` is."""
    match node:
        case ast.Compare(left=ast.Attribute(attr="transport")):
            return True
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr="weights"), ast.Name()]):
            return True
    return False


def test_no_module_asks_which_store_it_is() -> None:
    def questions() -> Iterator[str]:
        for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if asks_for_a_name(node):
                    yield f"{path.relative_to(ROOT)}: {ast.unparse(node)}"

    assert list(questions()) == []
