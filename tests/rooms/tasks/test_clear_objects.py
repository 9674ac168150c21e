"""Objects of jobs that nothing names go, a week after the last of them was written, and no others ever do."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from broker import keys
from broker.connection.client import connect
from broker.job_store import JobStore
from broker.task_store import Attempt
from contracts.errors import ObjectsUnavailable, Unavailable
from contracts.jobs import JobState
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskArguments, TaskResult
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.attempt import Progress
from onbeat.tasks.work.clear_objects import clear_objects
from onbeat.weights.objects import left_objects
from onbeat.weights.objects.blobs import open_blobs
from onbeat.weights.objects.bucket import Bucket
from tests.builders import job_spec
from tests.rooms.tasks.clock_parts import settings_of_tasks

WEEK_S = 7 * 86400.0
LEFT = "job-00000000dead"
"""A job of which nothing is known any more."""


class Store(NamedTuple):
    """A stack with an object store in a folder, whose files' times are those of the objects."""

    settings: StackSettings
    jobs: JobStore
    bucket: Path
    server: EmbeddedRedis

    def put(self, job_id: str, *, area: str = "run", days_old: float = 8.0, pointer: bool = False) -> list[str]:
        """Two objects of a job, written so long ago; their keys."""
        blobs = open_blobs(self.settings, job_id, area, deadline_s=10.0)  # type: ignore[arg-type]
        names = [f"{area}/{blobs.put(f'{job_id} {number}'.encode())}" for number in range(2)]
        if pointer:
            blobs.put_pointer("00000000000000000001-000000000", b"a list")
            names.append("pointers/00000000000000000001-000000000")
        for name in names:
            at_s = time.time() - days_old * 86400.0
            os.utime(self.bucket / job_id / name, (at_s, at_s))
        return sorted(f"{job_id}/{name}" for name in names)

    def clear(self) -> TaskResult:
        arguments = TaskArguments()
        attempt = Attempt(
            task_id="task-0123456789ab", turn=1, number=1, kind=TaskKind.CLEAR_OBJECTS, who="c", arguments=arguments
        )
        return clear_objects(connect(self.settings), self.settings, attempt, Progress())

    def keys_there(self) -> list[str]:
        return sorted(Bucket(self.settings.objects, deadline_s=10.0).objects(""))


@pytest.fixture
def store(server: EmbeddedRedis, tmp_path: Path) -> Store:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    settings = settings_of_tasks(server, tmp_path / "runs", objects=bucket.as_uri())
    jobs = JobStore(connect(StackSettings(redis_url=server.url)))
    jobs.create(job_spec())  # a server without any job may have lost its data
    return Store(settings, jobs, bucket, server)


def test_objects_that_no_job_names_go_and_are_counted(store: Store) -> None:
    store.put(LEFT)
    store.put(LEFT, area="weights")
    other = "job-00000000beef"
    store.put(other)
    result = store.clear()
    assert store.keys_there() == []
    num_bytes = 2 * len(f"{LEFT} 0") * 2 + 2 * len(f"{other} 0")
    assert (result.num_jobs, result.num_bytes) == (2, num_bytes)
    assert store.clear() == TaskResult(num_jobs=0, num_bytes=0)


def test_objects_of_every_job_that_redis_knows_stay_however_old_they_are(store: Store) -> None:
    queued, _ = store.jobs.create(job_spec())
    ended, _ = store.jobs.create(job_spec())
    store.jobs.move(ended, JobState.CANCELLED)
    removed, _ = store.jobs.create(job_spec())
    store.jobs.move(removed, JobState.CANCELLED)
    store.jobs.remove(removed)
    expected = sorted(key for job_id in (queued, ended, removed) for key in store.put(job_id, days_old=400.0))
    assert store.clear().num_jobs == 0
    assert store.keys_there() == expected


def test_objects_of_a_job_whose_note_can_not_be_read_stay(store: Store) -> None:
    expected = store.put(LEFT)
    connect(StackSettings(redis_url=store.server.url)).redis.hset(keys.REMOVED, LEFT, b"\xc1")  # type: ignore[arg-type]
    assert store.clear().num_jobs == 0
    assert store.keys_there() == expected


@pytest.mark.parametrize("why", ["pointer", "run folder", "a young object", "no job's name"])
def test_objects_stay_that_something_beside_redis_names_or_that_may_be_new(store: Store, why: str) -> None:
    job_id = "other-data" if why == "no job's name" else LEFT
    if why == "no job's name":
        (store.bucket / job_id).mkdir()
        path = store.bucket / job_id / "file"
        path.write_bytes(b"x")
        os.utime(path, (1.0, 1.0))
        expected = [f"{job_id}/file"]
    else:
        expected = store.put(job_id, pointer=why == "pointer")
    if why == "run folder":
        (store.settings.run_root_path / job_id).mkdir(parents=True)
    elif why == "a young object":
        expected = sorted(expected + store.put(job_id, area="weights", days_old=6.9))
    assert store.clear().num_jobs == 0
    assert store.keys_there() == expected


def test_a_job_that_comes_while_objects_are_listed_keeps_its_own(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a Redis that is restored in the middle: Redis is asked once more behind the listing."""
    expected = store.put(LEFT)
    sizes_and_ages = Bucket.sizes_and_ages

    def then_restored(self: Bucket, prefix: str) -> object:
        operator = connect(StackSettings(redis_url=store.server.url))
        operator.redis.zadd(keys.JOBS, {LEFT: 1.0})
        return sizes_and_ages(self, prefix)

    monkeypatch.setattr(Bucket, "sizes_and_ages", then_restored)
    assert store.clear().num_jobs == 0
    assert store.keys_there() == expected


def test_what_a_new_job_writes_meanwhile_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(LEFT)
    new: list[str] = []
    delete = Bucket.delete

    def after_a_new_job(self: Bucket, names: list[str]) -> None:
        if not new and any(LEFT in name for name in names):
            job_id, _ = store.jobs.create(job_spec())
            new.extend(store.put(job_id, days_old=0.0))
        delete(self, names)

    monkeypatch.setattr(Bucket, "delete", after_a_new_job)
    assert store.clear().num_jobs == 1
    assert store.keys_there() == sorted(new) != []


def test_a_redis_that_knows_no_job_makes_no_object_one_that_is_left(tmp_path: Path, store: Store) -> None:
    expected = store.put(LEFT, days_old=400.0)
    with EmbeddedRedis(tmp_path / "empty") as server:
        empty = store._replace(settings=settings_of_tasks(server, tmp_path / "runs", objects=store.bucket.as_uri()))
        assert empty.clear() == TaskResult(num_jobs=0, num_bytes=0)
    assert store.keys_there() == expected


def test_a_store_that_is_away_is_tried_again_by_the_task(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Bucket) -> list[str]:
        raise ObjectsUnavailable("does not answer", field="ONBEAT_OBJECTS")

    monkeypatch.setattr(Bucket, "folders", away)
    with pytest.raises(Unavailable):
        store.clear()


def test_a_run_that_ends_in_the_middle_is_finished_by_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(LEFT)
    store.put("job-00000000beef")
    delete, calls = Bucket.delete, []

    def once(self: Bucket, names: list[str]) -> None:
        calls.append(names)
        if len(calls) > 2:  # the first one asks for the time
            raise KeyboardInterrupt
        delete(self, names)

    monkeypatch.setattr(Bucket, "delete", once)
    with pytest.raises(KeyboardInterrupt):
        store.clear()
    monkeypatch.undo()
    assert store.clear().num_jobs == 1
    assert store.keys_there() == []
    assert left_objects.AGE_S == WEEK_S


def test_a_stack_without_a_store_has_nothing_to_clear(store: Store) -> None:
    plain = store._replace(settings=settings_of_tasks(store.server, store.settings.run_root_path))
    assert plain.clear() == TaskResult(num_jobs=0, num_bytes=0)
