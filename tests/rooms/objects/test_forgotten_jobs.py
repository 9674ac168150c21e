"""A job goes at its age where hosts share no folder: its copies in the object store go with its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.removals import Removals
from contracts.encoding.wire import encode
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.services import Services
from onbeat.run_folder.object_files import FileList, Listed, Piece
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.removal import file_remover
from onbeat.tasks.removal.file_remover import FileRemover
from onbeat.weights.objects.blobs import open_blobs
from tests.rooms.ended_jobs.test_age import KEPT_DAYS, Stack, known


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A gateway and a worker of tasks on two hosts."""
    (tmp_path / "bucket").mkdir()
    with EmbeddedRedis(tmp_path / "redis") as server:
        settings = StackSettings(
            redis_url=server.url,
            run_root=str(tmp_path / "runs"),
            objects=(tmp_path / "bucket").as_uri(),
            keep_ended_days=KEPT_DAYS,
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


def test_the_copies_of_a_forgotten_job_go_with_its_files_from_whichever_host_removes_them(
    stack: Stack, ended: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = open_blobs(stack.settings, ended.job_id, "run", deadline_s=10.0)
    assert stack.forget_due() == [ended.job_id]
    assert not known(stack, ended)
    elsewhere = FileRemover(stack.tasks, replace(stack.settings, run_root=stack.gateway.settings.run_root + "s"))
    elsewhere.remove_all()
    assert list(blobs.bucket.objects(ended.job_id)) == []
    assert ended.path.is_dir(), "the folder is that of the other host"
    stack.remove_files()
    assert not ended.path.exists()
    assert list(Removals(stack.tasks).notes().removals) == [ended.job_id], "a third host may have a folder, too"
    # A host that is gone for good is not waited for.
    monkeypatch.setattr(file_remover, "LATE_S", 0.0)
    elsewhere.remove_all()
    assert Removals(stack.tasks).notes().removals == {}


def test_a_resumed_job_keeps_its_copies(stack: Stack, ended: RunFolder) -> None:
    stack.operator.redis.hset(
        stack.operator.job_keys(ended.job_id).job, "ended_s", repr(stack.operator.now_s())
    )  # it has ended again
    assert stack.forget_due() == []
    stack.remove_files()
    assert known(stack, ended)
    assert open_blobs(stack.settings, ended.job_id, "run", deadline_s=10.0).pointers() != []
