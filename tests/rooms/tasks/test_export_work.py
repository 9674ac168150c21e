"""What an export writes: once, whatever attempts run beside each other, and nothing that stays for ever."""

from __future__ import annotations

import os
import shutil
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.task_store import Attempt
from contracts.errors import ContractViolation, NotFound, OnbeatError
from contracts.run_folder import RunFolder
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import ExportedFiles, TaskArguments
from onbeat.audit.weights import digest_of
from onbeat.tasks.attempt import Interrupted, Progress
from onbeat.tasks.exports import KEEP_S, LATE_S, UNFINISHED_S, folder_of, place_of, remove_expired_exports
from onbeat.tasks.work.export import export
from onbeat.tasks.work.stored_run import read_run
from onbeat.tasks.work.verify import verify
from tests.rooms.tasks.rig import WEIGHTS, TaskStack

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module", name="job")
def job_and_digest(task_stack: TaskStack) -> tuple[str, str]:
    """A job, and the digest of its version 1."""
    return task_stack.trained_job()


def begun_export(stack: TaskStack, job_id: str) -> Attempt:
    """An attempt of an export; the task is open until the test is over."""
    return stack.begun(TaskKind.EXPORT, TaskArguments(job_id=job_id), who=f"ann-{time.monotonic_ns()}")


def exported_by(stack: TaskStack, attempt: Attempt, progress: Progress | None = None) -> ExportedFiles:
    """Does the work of an attempt, with the rights of the role `tasks`."""
    settings = stack.settings("tasks")
    result = export(stack.broker, settings, attempt, progress or Progress())
    assert result.exported
    return result.exported


def test_attempts_beside_each_other_write_one_folder(task_stack: TaskStack, job: tuple[str, str]) -> None:
    """As where the first one was taken for dead, and lives."""
    job_id, digest = job
    first = begun_export(task_stack, job_id)
    second = replace_turn(first, 2)
    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(exported_by, task_stack, first)
        newer = pool.submit(exported_by, task_stack, second)
        assert newer.result().weights_digest == digest
        if older.exception() is not None:
            assert isinstance(older.exception(), OnbeatError), "its files were removed under it"
    place = place_of(task_stack.settings("tasks"), first.task_id)
    (folder,) = place.iterdir()
    assert folder == folder_of(task_stack.settings("tasks"), first.task_id, newer.result())
    assert digest_of([folder / "model.safetensors"]) == digest
    again = exported_by(task_stack, replace_turn(first, 3))
    assert (again.files, again.weights_digest) == (newer.result().files, digest)
    assert list(place.iterdir()) == [folder]


def replace_turn(attempt: Attempt, turn: int) -> Attempt:
    return Attempt(
        task_id=attempt.task_id,
        turn=turn,
        number=attempt.number,
        kind=attempt.kind,
        who=attempt.who,
        arguments=attempt.arguments,
    )


def test_what_a_killed_attempt_left_goes_with_the_next(task_stack: TaskStack, job: tuple[str, str]) -> None:
    attempt = begun_export(task_stack, job[0])
    place = place_of(task_stack.settings("tasks"), attempt.task_id)
    for name in ("attempt-1", ".attempt-1.0123456789ab"):
        (place / name).mkdir(parents=True)
        (place / name / "model.safetensors").write_bytes(b"half")
    exported = exported_by(task_stack, replace_turn(attempt, 2))
    assert [path.name for path in place.iterdir()] == [f"v000001-{exported.weights_digest[:16]}"]


class CancelledAmid(Progress):
    """Interrupts the work once it has written its first file, as the keeper's signal does."""

    def add(self, *, files: int = 0, num_bytes: int = 0) -> None:
        super().add(files=files, num_bytes=num_bytes)
        raise Interrupted("cancelled")


def test_an_export_that_is_cancelled_amid_leaves_nothing(task_stack: TaskStack, job: tuple[str, str]) -> None:
    attempt = begun_export(task_stack, job[0])
    with pytest.raises(Interrupted):
        exported_by(task_stack, attempt, CancelledAmid())
    assert not place_of(task_stack.settings("tasks"), attempt.task_id).exists()


def test_an_export_tells_how_far_it_is(task_stack: TaskStack, job: tuple[str, str]) -> None:
    progress = Progress()
    exported = exported_by(task_stack, begun_export(task_stack, job[0]), progress)
    record = progress.record()
    assert (record.files_done, record.files_total) == (1, 1)
    # Each byte of the tensors twice: as it is written, and as it is read again. The file has a head beside them.
    assert record.bytes_done == record.bytes_total
    assert 0 < 2 * exported.files["model.safetensors"] - record.bytes_done < 20_000


def test_an_export_without_room_is_refused_before_it_fills_the_disk(
    task_stack: TaskStack, job: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = begun_export(task_stack, job[0])
    place = place_of(task_stack.settings("tasks"), attempt.task_id)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    with pytest.raises(OnbeatError, match=r"has 10 bytes free, and the export takes [0-9]+ \(free space there") as full:
        exported_by(task_stack, attempt)
    assert full.value.field == str(place)
    assert not place.exists()


def test_works_refuse_a_job_that_nobody_knows_and_a_folder_that_is_elsewhere(
    task_stack: TaskStack, tmp_path: Path, job: tuple[str, str]
) -> None:
    settings = task_stack.settings("tasks")
    with pytest.raises(NotFound, match="Redis doesn't know the job"):
        read_run(task_stack.broker, settings, "job-000000000000")
    elsewhere = replace(settings, run_root=str(tmp_path))
    attempt = begun_export(task_stack, job[0])
    for work in (export, verify):
        with pytest.raises(NotFound, match="its run folder isn't below"):
            work(task_stack.broker, elsewhere, attempt, Progress())
    assert list(tmp_path.iterdir()) == []


def test_a_check_of_a_weight_root_that_is_not_here_says_so(
    task_stack: TaskStack, tmp_path: Path, job: tuple[str, str]
) -> None:
    settings = replace(task_stack.settings("tasks"), weight_root=str(tmp_path))
    attempt = task_stack.begun(TaskKind.VERIFY, TaskArguments(job_id=job[0]), who="notes")
    verdict = verify(task_stack.broker, settings, attempt, Progress()).verdict
    assert verdict
    assert (verdict.verified, verdict.digests_recomputed) == (True, 0)
    assert str(tmp_path) in verdict.notes[0]


def test_a_check_names_the_damaged_file(task_stack: TaskStack) -> None:
    job_id, _ = task_stack.trained_job()
    path = RunFolder(task_stack.run_root, job_id).weights_of(1) / WEIGHTS
    path.write_bytes(b"\xff" * 20)
    attempt = task_stack.begun(TaskKind.VERIFY, TaskArguments(job_id=job_id))
    with pytest.raises(ContractViolation) as damaged:
        verify(task_stack.broker, task_stack.settings("tasks"), attempt, Progress())
    assert damaged.value.field == str(path)
    task_stack.tasks.end(attempt, TaskState.FAILED, reason=str(damaged.value))
    assert str(path) in task_stack.tasks.status(attempt.task_id).reason


def test_exports_that_are_over_go_and_so_does_what_killed_attempts_left(task_stack: TaskStack, tmp_path: Path) -> None:
    settings = replace(task_stack.settings("tasks"), run_root=str(tmp_path))
    root = tmp_path / "exports"
    assert remove_expired_exports(settings) == 0
    cases = {
        "task-000000000001": (f"v000001-{'a' * 16}", KEEP_S + LATE_S + 60.0, False),
        "task-000000000002": (f"v000001-{'a' * 16}", KEEP_S + LATE_S - 60.0, True),
        "task-000000000003": (".attempt-1.0123456789ab", UNFINISHED_S + 60.0, False),
        "task-000000000004": (".attempt-1.0123456789ab", UNFINISHED_S - 60.0, True),
        "another": ("v000001", 10 * KEEP_S, True),
    }
    for name, (inner, age_s, _) in cases.items():
        (root / name / inner).mkdir(parents=True)
        (root / name / inner / "model.safetensors").write_bytes(b"weights")
        at_s = time.time() - age_s
        for path in (root / name / inner, root / name):
            os.utime(path, (at_s, at_s))
    assert remove_expired_exports(settings) == 2
    assert {path.name for path in root.iterdir()} == {name for name, (_, _, stays) in cases.items() if stays}
    assert remove_expired_exports(settings) == 0
