"""`onbeat verify`, `export` and `tasks` where only a gateway reaches the run folder, as on the host of compose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from contracts.run_folder import RunFolder
from contracts.tasks.kinds import TaskKind, TaskState
from contracts.tasks.records import TaskArguments
from gateway.api import tasks as routes
from onbeat.audit.weights import digest_of
from onbeat.base.http.tar_layout import TarLayout, tar_bytes
from onbeat.cli import run
from onbeat.commands.exports import fetched
from tests.chaos.short_job import long_variant
from tests.rooms.tasks.rig import KEY, WEIGHTS, TaskStack, endless_version
from tests.until import until

pytestmark = pytest.mark.usefixtures("restored_process")


@pytest.fixture
def http(working_stack: TaskStack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[httpx.Client]:
    """A gateway that commands find by their environment; the folder of a run root here is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(tmp_path / "nothing"))
    monkeypatch.setattr(fetched, "AGAIN_AFTER_S", 0.01)
    with working_stack.gateway() as http:
        monkeypatch.setenv("ONBEAT_GATEWAY_URL", str(http.base_url))
        monkeypatch.setenv("ONBEAT_API_KEY", KEY)
        yield http


def only_object(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@pytest.mark.usefixtures("http")
def test_a_model_is_exported_from_a_stack_whose_folders_are_out_of_reach(
    working_stack: TaskStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id, digest = working_stack.trained_job()
    assert run(["export", job_id, "model", "--json"]) == 0
    captured = capsys.readouterr()
    exported = json.loads(captured.out)
    assert (exported["policy_version"], exported["weights_digest"]) == (1, digest)
    assert exported["directory"] == str(tmp_path / "model")
    assert exported["files"] == sorted(path.name for path in (tmp_path / "model").iterdir())
    assert digest_of([tmp_path / "model" / "model.safetensors"]) == digest
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0
    status = working_stack.tasks.status(exported["task_id"])
    assert status.state is TaskState.DONE
    # The gateway of this test writes its log to the same place.
    shown = [line for line in captured.err.splitlines() if line.startswith(("export ", "fetches ", "hashes "))]
    assert shown[0].startswith(f"export {status.task_id} ")
    assert shown[-3].startswith(f"export {status.task_id} done  1 of 1 file, ")
    assert shown[-2].startswith(f"fetches {status.task_id} ")
    assert shown[-1].startswith("hashes 1 file of weights ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert run(["export", job_id, "another", "--model-root", "."]) == 2
    assert "--model-root: the stack's worker reads the job's model" in capsys.readouterr().err
    assert run(["export", job_id, "model"]) == 2
    assert "is not empty (give a new folder, or empty this one)" in capsys.readouterr().err
    assert len(working_stack.tasks.newest(10, where=lambda task: task.arguments.job_id == job_id)) == 1


@pytest.mark.usefixtures("http")
def test_a_download_that_breaks_off_goes_on_where_it_was(
    working_stack: TaskStack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, digest = working_stack.trained_job()
    starts: list[int] = []

    def breaking(folder: Path, layout: TarLayout, *, start: int = 0) -> Iterator[bytes]:
        starts.append(start)
        whole = b"".join(tar_bytes(folder, layout, start=start))
        yield whole[:10_000] if len(starts) < 3 else whole
        if len(starts) < 3:
            raise OSError("the disk is gone for a moment")

    monkeypatch.setattr(routes, "tar_bytes", breaking)
    assert run(["export", job_id, "model"]) == 0
    assert starts == [0, 10_000, 20_000]
    assert digest_of([tmp_path / "model" / "model.safetensors"]) == digest
    assert "the download broke off at byte 20000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "place", [pytest.param("head", marks=long_variant), "weights", pytest.param("longer", marks=long_variant)]
)
@pytest.mark.usefixtures("http")
def test_a_download_that_is_not_what_was_exported_leaves_nothing(
    working_stack: TaskStack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    job_id, _ = working_stack.trained_job()

    def damaged(folder: Path, layout: TarLayout, *, start: int = 0) -> Iterator[bytes]:
        data = bytearray(b"".join(tar_bytes(folder, layout, start=start)))
        weights = next(part for part in layout.parts if part.name == "model.safetensors")
        if place == "head":
            data[0:9] = b"../../evil"[:9]
        else:
            data[weights.start + weights.num_bytes - 1] ^= 1
        yield bytes(data)

    if place == "longer":
        monkeypatch.setattr(fetched, "TarLayout", lambda files: TarLayout({"model.safetensors": 5}))
    else:
        monkeypatch.setattr(routes, "tar_bytes", damaged)
    assert run(["export", job_id, "model"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    problems = {
        "head": "byte 0 of the tar isn't that of its files",
        "weights": "the received weights have the digest",
        "longer": "of the tar isn't that of its files",
    }
    assert problems[place] in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("http")
def test_a_check_by_a_task_fails_on_a_gap(working_stack: TaskStack, capsys: pytest.CaptureFixture[str]) -> None:
    job_id, _ = working_stack.trained_job()
    assert run(["verify", job_id]) == 0
    assert f"verified  {job_id}: 1 iteration," in capsys.readouterr().out
    path = RunFolder(working_stack.run_root, job_id).weights_of(1) / WEIGHTS
    path.write_bytes(b"\x02" + bytes(7) + b"{}")
    assert run(["verify", job_id, "--json"]) == 1
    (gap,) = only_object(capsys)["gaps"]
    assert gap.startswith(f"{job_id}/weights/v000001: the files have digest")
    path.write_bytes(b"\xff" * 20)
    assert run(["verify", job_id]) == 2
    assert "the task failed: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("http")
def test_ctrl_c_cancels_the_task_and_says_so(working_stack: TaskStack) -> None:
    job_id, _ = working_stack.trained_job()
    endless_version(RunFolder(working_stack.run_root, job_id).weights_of(2))
    command = subprocess.Popen(
        [sys.executable, "-m", "onbeat", "verify", job_id], env=os.environ, stderr=subprocess.PIPE, text=True
    )

    def running() -> bool:
        of_job = [task for task in working_stack.tasks.open() if task.arguments.job_id == job_id]
        return [task.state for task in of_job] == [TaskState.RUNNING]

    until(running, "the check")
    command.send_signal(signal.SIGINT)
    _, error = command.communicate(timeout=120.0)
    (status,) = working_stack.tasks.newest(1, where=lambda task: task.arguments.job_id == job_id)
    assert command.returncode == 130
    assert f"{status.task_id} is asked to end" in error
    assert error.splitlines()[-1] == "onbeat: interrupted"
    assert working_stack.ended(status.task_id).state is TaskState.CANCELLED


@pytest.mark.usefixtures("http")
def test_tasks_are_listed_shown_and_cancelled(
    working_stack: TaskStack, http: httpx.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    job_id, digest = working_stack.trained_job()
    assert run(["jobs", "--tasks", "--job", job_id]) == 0
    assert capsys.readouterr().out == "no task is like that\n"
    assert run(["export", job_id, "model", "--json"]) == 0
    done = only_object(capsys)["task_id"]
    failed = http.post(f"/v1/jobs/{job_id}/export", json={"version": 7}).json()["task_id"]
    working_stack.ended(failed)
    assert run(["jobs", "--tasks", "--job", job_id]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["task", "kind", "state", "job", "who", "asked", "took", "progress"]
    assert rows[0].startswith(f"{failed} export failed")
    assert rows[1].startswith(f"{done} export done")
    assert "1 of 1 file, " in rows[1]
    assert any(row.startswith(f"{failed}  failed: --version: there is no version 7") for row in rows)
    assert run(["jobs", "--tasks", "--job", job_id, "--state", "done", "--kind", "export", "--json"]) == 0
    assert [task["task_id"] for task in only_object(capsys)["tasks"]] == [done]
    assert run(["jobs", "--tasks", done]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"version 1, {digest[:12]}…, of {job_id}/weights/v000001" in shown
    assert "kept until" in shown
    assert run(["jobs", "--tasks", "--cancel", done]) == 2
    assert "a task that is done cannot be cancelled" in capsys.readouterr().err
    # No worker takes from the queue of a host that there isn't.
    waits, _ = working_stack.tasks.create(
        TaskKind.EXPORT, TaskArguments(job_id=job_id), who="ann", queue="files@nowhere"
    )
    assert run(["jobs", "--tasks", waits]) == 0
    assert "waits for a worker of the queue files on nowhere, but none is running" in capsys.readouterr().out
    assert run(["jobs", "--tasks", "--cancel", waits]) == 0
    assert capsys.readouterr().out == f"{waits} is cancelled\n"
    assert run(["jobs", "--tasks", waits, "--cancel", waits]) == 2
    assert run(["jobs", "--tasks", "task-1"]) == 2
    capsys.readouterr()
    assert run(["jobs", "--tasks", "--state", "succeeded"]) == 2
    assert "--state: `succeeded` is not one of queued, " in capsys.readouterr().err
    for flags in (["--cancel", done], ["--job", job_id], ["--kind", "export"]):
        assert run(["jobs", *flags]) == 2
        assert f"{flags[0]}: is a flag of --tasks (add --tasks, or leave it out)" in capsys.readouterr().err
    assert run(["jobs", done]) == 2
    assert f"onbeat jobs --tasks {done} a task" in capsys.readouterr().err
    assert run(["watch", job_id]) == 0
    watched = capsys.readouterr().out
    assert f"task export {done} done" in watched
    assert f"task export {failed} failed: --version: there is no version 7" in watched
    assert f"task export {waits} cancelled: cancelled by the operator" in watched
