"""Kept runs are verified again, all of them in a round, and never so many at once that a person's task has no room."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.task_store import MAX_WAITING, Attempt, TaskStore
from contracts.jobs import JobState
from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments
from onbeat.stack.redis import EmbeddedRedis
from onbeat.tasks.attempt import Progress
from onbeat.tasks.work import verify_kept as verify_kept_module
from onbeat.tasks.work.verify_kept import AT_ONCE, ENTRY, MAX_OPEN, verify_kept
from tests.builders import job_spec
from tests.rooms.tasks.clock_parts import finish_all, settings_of_tasks

DAY_S = 86400.0


class Kept:
    """A run root with kept runs, and the work over it."""

    def __init__(self, settings: StackSettings, operator: Broker) -> None:
        self.settings = settings
        self.jobs = JobStore(operator)
        self.broker = connect(settings)
        self.store = TaskStore(self.broker)
        settings.run_root_path.mkdir(parents=True)

    def ended(self) -> str:
        """An ended job that Redis knows, with a run folder."""
        job_id, _ = self.jobs.create(job_spec())
        self.jobs.move(job_id, JobState.CANCELLED)
        (self.settings.run_root_path / job_id).mkdir()
        return job_id

    def run(self) -> int:
        attempt = Attempt(
            task_id="task-0123456789ab",
            turn=1,
            number=1,
            kind=TaskKind.VERIFY_KEPT,
            who="the clock",
            arguments=TaskArguments(),
        )
        result = verify_kept(self.broker, self.settings, attempt, Progress())
        assert isinstance(result.num_jobs, int)
        return result.num_jobs

    def asked(self) -> list[str]:
        """The jobs whose check waits, sorted: tasks of one millisecond have no order."""
        return sorted(task.arguments.job_id for task in self.store.open() if task.kind is TaskKind.VERIFY)


@pytest.fixture
def kept(server: EmbeddedRedis, tmp_path: Path) -> Kept:
    settings = settings_of_tasks(server, tmp_path / "runs", verify_kept_days=7.0)
    return Kept(settings, connect(StackSettings(redis_url=server.url)))


def test_every_ended_job_whose_folder_is_here_is_asked_for_and_no_other(kept: Kept) -> None:
    ended = kept.ended()
    forgotten, without_chain = "job-0000000000aa", "job-0000000000bb"
    for job_id in (forgotten, without_chain):
        (kept.settings.run_root_path / job_id).mkdir()
    (kept.settings.run_root_path / forgotten / "audit.json").write_text("{}")
    (kept.settings.run_root_path / "redis").mkdir()
    running, _ = kept.jobs.create(job_spec())
    (kept.settings.run_root_path / running).mkdir()
    gone, _ = kept.jobs.create(job_spec())
    kept.jobs.move(gone, JobState.CANCELLED)
    assert kept.run() == 2
    assert kept.asked() == sorted([ended, forgotten])
    assert {task.who for task in kept.store.open()} == {"the clock"}


def test_a_round_goes_through_all_jobs_some_at_a_time_and_begins_again_when_its_days_are_over(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = sorted(kept.ended() for _ in range(2 * AT_ONCE + 5))
    asked: list[str] = []
    for expected in (AT_ONCE, AT_ONCE, 5, 0, 0):
        assert kept.run() == expected
        asked += kept.asked()
        finish_all(kept.store)
    assert asked == job_ids
    now_s = verify_kept_module.time.time()
    monkeypatch.setattr(verify_kept_module.time, "time", lambda: now_s + 6.9 * DAY_S)
    assert kept.run() == 0
    monkeypatch.setattr(verify_kept_module.time, "time", lambda: now_s + 7.1 * DAY_S)
    assert kept.run() == AT_ONCE


def test_the_queue_keeps_room_for_people_and_the_rest_comes_later(kept: Kept) -> None:
    for number in range(MAX_OPEN - 3):
        kept.store.create(TaskKind.VERIFY, TaskArguments(job_id=f"job-{number:012x}"), who="a person")
    job_ids = sorted(kept.ended() for _ in range(5))
    assert kept.run() == 3
    assert kept.run() == 0, "no worker has taken one"
    assert sum(task.state is TaskState.QUEUED for task in kept.store.open()) == MAX_OPEN < MAX_WAITING
    finish_all(kept.store)
    assert kept.run() == 2
    assert kept.asked() == job_ids[3:]


def test_a_run_that_ended_in_the_middle_goes_on_and_asks_for_no_job_twice_at_a_time(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_ids = sorted(kept.ended() for _ in range(4))
    set_place, places = TaskStore.set_place, []

    def interrupted(self: TaskStore, entry: str, place: str) -> None:
        places.append(place)
        if len(places) == 2:  # the second task is there, and the place doesn't say so
            raise KeyboardInterrupt
        set_place(self, entry, place)

    monkeypatch.setattr(TaskStore, "set_place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept.run()
    monkeypatch.undo()
    assert kept.run() == 3
    assert kept.asked() == job_ids


@pytest.mark.parametrize("damage", ["", "{", '{"job_id": 1}', "x" * 100])
def test_a_place_that_can_not_be_read_begins_a_round(kept: Kept, damage: str) -> None:
    kept.ended()
    kept.store.set_place(ENTRY, damage)
    assert kept.run() == 1


def test_a_round_of_a_clock_that_was_ahead_is_not_waited_for(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.ended()
    now_s = verify_kept_module.time.time()
    monkeypatch.setattr(verify_kept_module.time, "time", lambda: now_s + 4000 * DAY_S)
    assert kept.run() == 1
    finish_all(kept.store)
    monkeypatch.undo()
    assert kept.run() == 1


def test_days_are_the_operators(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.ended()
    assert kept.run() == 1
    finish_all(kept.store)
    kept.settings = replace(kept.settings, verify_kept_days=0.5)
    now_s = verify_kept_module.time.time()
    monkeypatch.setattr(verify_kept_module.time, "time", lambda: now_s + 0.6 * DAY_S)
    assert kept.run() == 1


def test_jobs_whose_files_are_in_the_object_store_alone_are_kept_too(kept: Kept, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    kept.settings = replace(kept.settings, objects=bucket.as_uri(), run_root=str(tmp_path / "another host's"))
    known, _ = kept.jobs.create(job_spec())
    kept.jobs.move(known, JobState.CANCELLED)
    running, _ = kept.jobs.create(job_spec())
    unknown = "job-0000000000bb"
    for job_id in (known, running, unknown):
        (bucket / job_id / "run").mkdir(parents=True)
        (bucket / job_id / "run" / "x").write_bytes(b"x")
    assert kept.run() == 1
    assert kept.asked() == [known]
