"""The record of a job that Redis has forgotten, where hosts share no folder: any of them has it from the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.removals import Removals
from contracts.encoding.wire import encode
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.api.deletion import remove_for_good
from gateway.services import Services
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.run_folder.object_files import FileList, Listed, Piece
from onbeat.run_folder.run_files import bring_missing
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.removal import sweeper
from onbeat.tasks.removal.sweeper import Sweeper
from onbeat.weights.objects.blobs import open_blobs
from tests.rooms.retention.test_retention import Stack, known


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A gateway and a worker of tasks on two hosts."""
    (tmp_path / "bucket").mkdir()
    with EmbeddedRedis(tmp_path / "redis") as server:
        settings = StackSettings(
            redis_url=server.url, run_root=str(tmp_path / "runs"), objects=(tmp_path / "bucket").as_uri()
        )
        of_gateway = replace(settings, run_root=str(tmp_path / "of the gateway"), api_key="test-key")
        services = Services(settings=of_gateway, broker=connect(of_gateway))
        broker = connect(settings)
        yield Stack(operator=broker, gateway=services, consumer=broker, tasks=broker, settings=settings)


def copied(stack: Stack, folder: RunFolder) -> None:
    """What its trainer has left in the store: a list with the spec, by the pointer of its last checkpoint."""
    blobs = open_blobs(stack.settings, folder.job_id, "run", deadline_s=10.0)
    files = {folder.spec.name: (blobs.put_file(folder.spec),)}
    text = encode(FileList(job_id=folder.job_id, trainer_epoch=1, iteration=0, files=files))
    at = Piece(digest=blobs.put(text), num_bytes=len(text))
    blobs.put_pointer(f"{1:020d}-{0:09d}", encode(Listed(trainer_epoch=1, iteration=0, at=at)))


@pytest.fixture
def ended(stack: Stack) -> RunFolder:
    folder = stack.ended(days_ago=31)
    copied(stack, folder)
    return folder


def seen_from(stack: Stack, folder: RunFolder, name: str) -> RunFolder:
    """The run folder as another host has it that asks the store for it."""
    settings = replace(stack.settings, run_root=str(stack.settings.run_root_path.with_name(name)))
    there = RunFolder(settings.run_root_path, folder.job_id)
    bring_missing(settings, there)
    return there


def test_any_host_has_the_record_of_a_job_that_was_forgotten(stack: Stack, ended: RunFolder) -> None:
    assert stack.forget_due() == [], "nothing is put aside yet"
    stack.sweep()
    assert not seen_from(stack, ended, "before").audit.exists()
    assert stack.forget_due() == [ended.job_id]
    assert not known(stack, ended)
    stack.sweep()
    assert Removals(stack.tasks).notes().removals == {}
    shutil.rmtree(ended.path)
    there = seen_from(stack, ended, "after")
    assert not there.audit_aside.exists()
    entries = read_audit_file(there.audit).entries
    assert verify_run(entries, read_spec(there), complete=True, digests_on_disk={}).gaps == ()


def test_a_host_without_the_folder_names_the_copy_and_leaves_the_folder_to_the_host_that_has_it(
    stack: Stack, ended: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.sweep()
    stack.forget_due()
    elsewhere = Sweeper(stack.tasks, replace(stack.settings, run_root=stack.gateway.settings.run_root + "s"))
    elsewhere.sweep()
    assert seen_from(stack, ended, "after").audit.exists()
    assert list(Removals(stack.tasks).notes().removals) == [ended.job_id], "the other host has not seen to it"
    stack.sweep()
    assert ended.audit.exists()
    assert Removals(stack.tasks).notes().removals == {}
    # A host that is gone for good is not waited for.
    remove_for_good(stack.gateway, ended.job_id)
    monkeypatch.setattr(sweeper, "LATE_S", 0.0)
    elsewhere.sweep()
    assert Removals(stack.tasks).notes().removals == {}
    blobs = open_blobs(stack.settings, ended.job_id, "run", deadline_s=10.0)
    assert blobs.pointers() == []


def test_a_resumed_job_is_not_forgotten_by_the_record_of_its_first_end(stack: Stack, ended: RunFolder) -> None:
    stack.sweep()
    stack.operator.redis.hset(stack.operator.job_keys(ended.job_id).job, "ended_s", "1.0")  # it has ended again
    assert stack.forget_due() == []
    assert known(stack, ended)
