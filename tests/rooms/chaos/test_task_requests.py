"""What a campaign finds wrong with the tasks that it asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contracts.settings import StackSettings
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import ExportedFiles, ExportRequest, TaskResult, TaskStatus
from onbeat.chaos.task_requests import AskedTasks, child_of
from onbeat.tasks.exports import folder_of, place_of

VERIFY, EXPORT = "task-00000000000a", "task-00000000000b"
DIGEST = "ab" * 32
FILES = {"model.safetensors": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
"""SHA-256 of no bytes."""


class StandInGateway:
    """Its tasks have ended as the test says."""

    def __init__(self, *, exported: TaskStatus, still_open: Sequence[TaskStatus] = ()) -> None:
        self._statuses = {VERIFY: ended(VERIFY, TaskKind.VERIFY), EXPORT: exported}
        self._open = list(still_open)

    def begin_verify(self, _: str) -> TaskStatus:
        return self._statuses[VERIFY]

    def begin_export(self, _: str, asked: ExportRequest) -> TaskStatus:
        assert asked == ExportRequest()
        return self._statuses[EXPORT]

    def task(self, task_id: str) -> TaskStatus:
        return self._statuses[task_id]

    def tasks(self, **_: Any) -> list[TaskStatus]:
        return self._open


def ended(task_id: str, kind: TaskKind, state: TaskState = TaskState.DONE, **fields: Any) -> TaskStatus:
    return TaskStatus(task_id=task_id, kind=kind, queue="files", state=state, who="a key", created_s=0.0, **fields)


def exported(digest: str = DIGEST) -> TaskStatus:
    files = ExportedFiles(
        policy_version=1, weights_digest=digest, files_digest=digest, source="s", base="b", files={}, num_bytes=0
    )
    return ended(EXPORT, TaskKind.EXPORT, result=TaskResult(exported=files))


def problems(folder: Path, gateway: Any, *, files: dict[str, str]) -> list[str]:
    def patiently(ask: Callable[[], object]) -> object:
        return ask()

    tasks = AskedTasks(gateway, StackSettings(run_root=str(folder)), patiently=patiently, tick=lambda: None)
    verify, export = tasks.ask_at_the_end("job-0123456789ab")
    return tasks.problems("job-0123456789ab", verify, export, digest=DIGEST, files=files)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A run root with the export in it."""
    status = exported()
    assert status.result
    assert status.result.exported
    folder = folder_of(StackSettings(run_root=str(tmp_path)), EXPORT, status.result.exported)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()
    return tmp_path


def test_tasks_that_ended_as_those_of_the_undisturbed_run_are_no_finding(written: Path) -> None:
    assert problems(written, StandInGateway(exported=exported()), files=FILES) == []


def test_a_task_that_failed_is_open_or_made_other_files_or_two_folders_is_a_finding(written: Path) -> None:
    failed = ended(EXPORT, TaskKind.EXPORT, TaskState.FAILED, reason="its worker has ended 3 times while it ran")
    assert problems(written, StandInGateway(exported=failed), files={}) == [
        f"{EXPORT}, export, is failed: its worker has ended 3 times while it ran"
    ]
    still_open = ended("task-00000000000c", TaskKind.VERIFY, TaskState.QUEUED)
    gateway = StandInGateway(exported=exported(), still_open=[still_open])
    assert problems(written, gateway, files=FILES) == ["task-00000000000c is open"]
    other = problems(written, StandInGateway(exported=exported()), files={"model.safetensors": "other"})
    assert other == [f"{EXPORT} has other files than the undisturbed run's"]
    (place_of(StackSettings(run_root=str(written)), EXPORT) / "attempt-2").mkdir()
    (twice,) = problems(written, StandInGateway(exported=exported()), files=FILES)
    assert twice.startswith(f"{EXPORT} left attempt-2, v000001-")


def test_a_worker_without_a_child_has_none_to_kill() -> None:
    with pytest.raises(LookupError):
        child_of(2**22 + 1)
