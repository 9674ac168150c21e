"""What the clock and a deletion start does its work once, however often and late it runs, and touches nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from broker import keys
from broker.job_store import JobStore
from broker.removals import Removals
from broker.task_store import MAX_WAITING, Attempt, TaskStore
from contracts.encoding.wire import encode
from contracts.errors import Conflict, NotFound
from contracts.jobs import JobState, ResumeRequest
from contracts.run_folder import Removal, RunFolder
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments, TaskResult
from gateway.api.deletion import TASK_HEADER, remove_for_good
from gateway.app import create_app
from onbeat.tasks.attempt import Interrupted, Progress
from onbeat.tasks.removal import trees
from onbeat.tasks.work.delete import delete
from onbeat.tasks.work.forget import forget
from onbeat.tasks.work.remove_files import remove_files
from onbeat.tasks.works import WORKS, Function
from tests.builders import job_spec
from tests.pipeline import REPOSITORY
from tests.rooms.ended_jobs.test_age import Stack, known, stack_below
from tests.rooms.tasks.clock_parts import CLOCK, WORKER, process_of
from tests.served import asked
from tests.until import until


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with stack_below(tmp_path) as stack:
        yield stack


def attempt_at(kind: TaskKind, *, job_id: str = "") -> Attempt:
    arguments = TaskArguments(job_id=job_id)
    return Attempt(task_id="task-0123456789ab", turn=1, number=1, kind=kind, who="a person", arguments=arguments)


def run(stack: Stack, work: Function, kind: TaskKind, *, job_id: str = "") -> TaskResult:
    return work(stack.tasks, stack.settings, attempt_at(kind, job_id=job_id), Progress())


def cancelled(stack: Stack) -> RunFolder:
    """An ended job with files."""
    job_id, _ = stack.jobs.create(job_spec())
    stack.jobs.move(job_id, JobState.CANCELLED)
    folder = stack.folder(job_id)
    for path in (folder.checkpoint_after(3), folder.weights_of(4)):
        path.mkdir(parents=True)
        (path / "file").write_bytes(b"x")
    return folder


def every_file(stack: Stack) -> list[Path]:
    return sorted(stack.settings.run_root_path.rglob("*"))


def test_each_kind_that_is_done_here_is_found_by_its_name() -> None:
    kinds = {TaskKind.REMOVE_FILES, TaskKind.DELETE, TaskKind.FORGET, TaskKind.BACKUP, TaskKind.CLEAR_OBJECTS}
    assert kinds | {TaskKind.VERIFY_KEPT} <= WORKS.keys()


def test_a_deletion_is_answered_at_once_and_its_task_removes_the_files_and_no_others(stack: Stack) -> None:
    folder, other = cancelled(stack), cancelled(stack)
    ask = partial(asked, create_app(stack.gateway), key="test-key")
    gone = ask("DELETE", f"/v1/jobs/{folder.job_id}")
    assert (gone.status_code, gone.content, known(stack, folder)) == (204, b"", False)
    assert folder.path.is_dir(), "the gateway removes no file"
    store = TaskStore(stack.tasks)
    status = store.status(gone.headers[TASK_HEADER])
    assert (status.kind, status.arguments.job_id, status.who) == (TaskKind.DELETE, folder.job_id, "the operator")
    with process_of(WORKER, stack.settings):
        until(lambda: store.status(status.task_id).state is TaskState.DONE, "the removal", deadline_s=120.0)
    result = store.status(status.task_id).result
    assert result is not None
    assert result.num_jobs == 1
    assert not folder.path.exists()
    assert other.checkpoint_after(3).is_dir()
    assert list(stack.operator.redis.scan_iter(match=f"*{folder.job_id}*")) == [], "no key of the job comes back"


def test_a_repeated_deletion_is_the_same_task_while_it_waits(stack: Stack) -> None:
    folder = cancelled(stack)
    ask = partial(asked, create_app(stack.gateway), key="test-key")
    answers = [ask("DELETE", f"/v1/jobs/{folder.job_id}") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [204] * 3
    assert len({answer.headers[TASK_HEADER] for answer in answers}) == 1


def test_a_deletion_whose_task_has_no_room_is_a_deletion_all_the_same(stack: Stack) -> None:
    folder = cancelled(stack)
    store = TaskStore(stack.tasks)
    for number in range(MAX_WAITING):
        store.create(TaskKind.EXPORT, TaskArguments(job_id=folder.job_id, version=number), who="a person")
    gone = asked(create_app(stack.gateway), "DELETE", f"/v1/jobs/{folder.job_id}", key="test-key")
    assert gone.status_code == 204
    assert TASK_HEADER not in gone.headers
    assert list(Removals(stack.tasks).notes().removals) == [folder.job_id]
    run(stack, remove_files, TaskKind.REMOVE_FILES)
    assert not folder.path.exists()


def test_a_removal_that_runs_again_later_removes_nothing_that_came_between(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of Redis or of a worker: the same task, a day later."""
    monkeypatch.setattr("onbeat.tasks.removal.file_remover.LATE_S", 0.0)
    folder, resumed, source = cancelled(stack), cancelled(stack), stack.ended(days_ago=0.0)
    remove_for_good(stack.gateway, folder.job_id)
    assert run(stack, delete, TaskKind.DELETE, job_id=folder.job_id).num_jobs == 1
    assert not folder.path.exists()
    # A new job, a resumed one, and one that goes on from an ended one.
    new, _ = stack.jobs.create(job_spec())
    stack.folder(new).checkpoint_after(0).mkdir(parents=True)
    stack.jobs.resume(resumed.job_id, ResumeRequest(iterations=9))
    fork, _ = stack.jobs.create(job_spec(fork={"job": source.job_id, "version": 1}))
    stack.folder(fork).checkpoint_after(0).mkdir(parents=True)
    before = every_file(stack)
    for job_id in (folder.job_id, new, resumed.job_id, source.job_id, fork):
        assert run(stack, delete, TaskKind.DELETE, job_id=job_id).num_jobs == 0
    run(stack, remove_files, TaskKind.REMOVE_FILES)
    run(stack, forget, TaskKind.FORGET)
    assert every_file(stack) == before
    assert {new, resumed.job_id, source.job_id, fork} == set(stack.jobs.job_ids())


def test_files_of_a_job_that_redis_knows_stay_whatever_a_note_says(stack: Stack) -> None:
    """No function writes such a note; an operator who restores a part of Redis may."""
    folder = cancelled(stack)
    note = encode(Removal(at_s=time.time()))
    stack.operator.redis.hset(keys.REMOVED, folder.job_id, note)  # type: ignore[arg-type]
    before = every_file(stack)
    run(stack, delete, TaskKind.DELETE, job_id=folder.job_id)
    run(stack, remove_files, TaskKind.REMOVE_FILES)
    assert every_file(stack) == before


def test_files_that_are_to_go_stay_for_a_fork_that_came_before_they_went(stack: Stack) -> None:
    folder = stack.ended(days_ago=40)
    run(stack, forget, TaskKind.FORGET)
    fork, _ = stack.jobs.create(job_spec(fork={"job": folder.job_id, "version": 1}))
    run(stack, delete, TaskKind.DELETE, job_id=folder.job_id)
    assert folder.checkpoint_after(0).is_dir()
    stack.jobs.request_cancel(fork)
    run(stack, delete, TaskKind.DELETE, job_id=folder.job_id)
    assert not folder.path.exists()


def test_a_forgetting_that_is_overtaken_by_a_resume_forgets_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stack.ended(days_ago=40)
    remove = JobStore.remove

    def after_a_resume(self: JobStore, job_id: str, *, seen_ended_s: str | None = None) -> None:
        monkeypatch.undo()
        stack.jobs.resume(folder.job_id, ResumeRequest(iterations=2))
        stack.jobs.request_cancel(folder.job_id)
        remove(self, job_id, seen_ended_s=seen_ended_s)

    monkeypatch.setattr(JobStore, "remove", after_a_resume)
    assert run(stack, forget, TaskKind.FORGET).num_jobs == 0
    assert stack.jobs.state(folder.job_id) is JobState.CANCELLED
    assert run(stack, forget, TaskKind.FORGET).num_jobs == 0, "its end is of today"


@pytest.mark.parametrize("kind", [TaskKind.REMOVE_FILES, TaskKind.DELETE])
def test_a_removal_that_is_interrupted_in_the_middle_is_finished_by_the_next_run(
    kind: TaskKind, stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = cancelled(stack), cancelled(stack)
    remove_for_good(stack.gateway, folder.job_id)
    work = {TaskKind.REMOVE_FILES: remove_files, TaskKind.DELETE: delete}[kind]
    removed: list[Path] = []
    rmtree = shutil.rmtree

    def interrupted(path: Path) -> None:
        rmtree(path / "weights")
        removed.append(path)
        raise Interrupted("stopped")

    monkeypatch.setattr(trees.shutil, "rmtree", interrupted)
    with pytest.raises(Interrupted):
        run(stack, work, kind, job_id=folder.job_id)
    monkeypatch.undo()
    assert [path.name for path in removed] == [f".{folder.job_id}.removed"]
    assert (removed[0] / "checkpoints").is_dir(), "half of it is left, where no reader looks"
    assert not folder.path.exists()
    assert list(Removals(stack.tasks).notes().removals) == [folder.job_id]
    run(stack, work, kind, job_id=folder.job_id)
    assert not removed[0].exists()
    assert other.checkpoint_after(3).is_dir()


def test_a_removal_and_a_deletion_of_the_same_files_at_the_same_time_harm_each_other_nothing(stack: Stack) -> None:
    folders = [cancelled(stack) for _ in range(4)]
    for folder in folders:
        for number in range(200):
            (folder.path / f"{number}").write_bytes(b"x")
        remove_for_good(stack.gateway, folder.job_id)
    program = (
        "import os, sys; from broker.connection.client import connect; from contracts.settings import settings_from;"
        "from onbeat.tasks.removal.file_remover import FileRemover;"
        "settings = settings_from(os.environ); remover = FileRemover(connect(settings), settings);"
        "[remover.remove(job) for job in sys.argv[1:]] or remover.remove_all()"
    )
    environment = os.environ | stack.settings.environment()
    job_ids = [folder.job_id for folder in folders]
    both = [
        subprocess.Popen([sys.executable, "-c", program, *arguments], env=environment, cwd=REPOSITORY)
        for arguments in (job_ids, [], job_ids[::-1])
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0, 0]
    assert [path for path in every_file(stack) if "job-" in path.name] == []


def test_clock_and_worker_remove_a_job_at_its_age_with_all_its_files_and_no_other(stack: Stack) -> None:
    """The whole way, by real processes: keys, note, files."""
    folder, younger = stack.ended(days_ago=31), stack.ended(days_ago=29)
    with process_of(WORKER, stack.settings), process_of(CLOCK, stack.settings):
        until(lambda: not known(stack, folder), "the job, forgotten")
        until(lambda: not folder.path.exists(), "its files, removed")
    assert known(stack, younger)
    assert younger.weights_of(1).is_dir()
    with pytest.raises(NotFound):
        stack.jobs.state(folder.job_id)


def test_a_live_job_is_not_deleted_and_begins_no_task(stack: Stack) -> None:
    job_id, _ = stack.jobs.create(job_spec())
    refused = asked(create_app(stack.gateway), "DELETE", f"/v1/jobs/{job_id}", key="test-key")
    assert (refused.status_code, TASK_HEADER in refused.headers) == (409, False)
    assert TaskStore(stack.tasks).open() == []
    with pytest.raises(Conflict):
        remove_for_good(stack.gateway, job_id)
