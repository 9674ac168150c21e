"""The endpoints of tasks: who may ask for what, how tasks are listed and cancelled, and why they wait."""

from __future__ import annotations

import hashlib
import socket
import time
from functools import partial
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

import broker.task_store
from broker.presence import TaskPresence
from contracts.encoding.wire import convert
from contracts.monitor import TaskWorkerSeen
from contracts.tasks.kinds import TaskKind, TaskQueue, TaskState, queue_of_host
from contracts.tasks.records import (
    ExportedFiles,
    TaskArguments,
    TaskList,
    TaskProgress,
    TaskResult,
    TaskStatus,
)
from gateway.app import create_app
from gateway.services import Services
from onbeat.tasks.exports import folder_of
from tests.rooms.tasks.rig import TaskStack, ask_of, status_of
from tests.served import asked

Ask = partial[httpx.Response]
DIGEST = "a" * 64
KEYS = (("ann", "read"), ("ben", "submit"), ("root", "admin"))


@pytest.fixture
def ask(services: Services) -> Ask:
    """Asks the gateway with the operator's key."""
    return ask_of(services)


@pytest.fixture(scope="module")
def job_id(task_stack: TaskStack) -> str:
    return task_stack.trained_job()[0]


def listed(ask: Ask, question: str) -> list[str]:
    answer = ask("GET", f"/v1/tasks?{question}")
    assert answer.status_code == 200, answer.text
    return [status.task_id for status in convert(answer.json(), TaskList).tasks]


def test_a_task_says_that_no_worker_lives_and_how_to_start_one(ask: Ask, task_stack: TaskStack, job_id: str) -> None:
    status = status_of(ask("POST", f"/v1/jobs/{job_id}/verify"))
    assert status.state is TaskState.QUEUED
    assert status.reason == (
        "waits for a worker of the queue check, but none is running: start one with `onbeat up`, the service "
        "`tasks`, or `python -m onbeat.tasks check`"
    )
    assert status_of(ask("GET", f"/v1/tasks/{status.task_id}")) == status
    presence = TaskPresence(task_stack.broker)
    presence.beat(TaskWorkerSeen(worker_id="t-1", host="here", queues=("check",)))
    assert status_of(ask("GET", f"/v1/tasks/{status.task_id}")).reason == ""
    presence.leave("t-1")
    cancelled = ask("DELETE", f"/v1/tasks/{status.task_id}")
    assert (cancelled.status_code, status_of(cancelled).state) == (200, TaskState.CANCELLED)
    assert status_of(cancelled).reason == "cancelled by the operator"
    assert ask("DELETE", f"/v1/tasks/{status.task_id}").status_code == 200, "repeating it changes nothing"


def test_tasks_are_found_by_job_state_and_kind(ask: Ask, task_stack: TaskStack, job_id: str) -> None:
    check = status_of(ask("POST", f"/v1/jobs/{job_id}/verify")).task_id
    export = status_of(ask("POST", f"/v1/jobs/{job_id}/export")).task_id
    other, _ = task_stack.tasks.create(TaskKind.BACKUP, TaskArguments(), who="ann")
    assert listed(ask, "limit=3") == [other, export, check]
    assert listed(ask, f"job_id={job_id}&limit=2") == [export, check]
    assert listed(ask, f"job_id={job_id}&kind=verify&limit=1") == [check]
    assert listed(ask, "kind=backup&state=queued&state=running") == [other]
    ask("DELETE", f"/v1/tasks/{other}")
    assert listed(ask, "kind=backup&state=queued") == []
    assert listed(ask, "kind=backup&state=cancelled") == [other]
    answer = ask("GET", "/v1/tasks?kind=trains")
    assert (answer.status_code, answer.json()["field"]) == (422, "kind")
    for task_id in (check, export):
        ask("DELETE", f"/v1/tasks/{task_id}")


@pytest.mark.parametrize(("method", "behind"), [("GET", ""), ("DELETE", ""), ("GET", "/files")])
@pytest.mark.parametrize("task_id", ["task-000000000000", "task-1", "..%2ftasks"])
def test_an_unknown_task_is_not_found(ask: Ask, method: str, behind: str, task_id: str) -> None:
    answer = ask(method, f"/v1/tasks/{task_id}{behind}")
    assert answer.status_code == 404, answer.text


def test_a_full_queue_answers_when_to_ask_again(
    ask: Ask, task_stack: TaskStack, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.task_store, "MAX_WAITING", 1)
    first = status_of(ask("POST", f"/v1/jobs/{job_id}/verify"))
    assert status_of(ask("POST", f"/v1/jobs/{job_id}/verify")).task_id == first.task_id, "the same is asked for"
    other, _ = task_stack.trained_job()
    full = ask("POST", f"/v1/jobs/{other}/verify?wait=10")
    assert (full.status_code, full.headers["Retry-After"]) == (503, "30")
    assert full.json()["detail"] == "1 tasks wait in the queue check"
    ask("DELETE", f"/v1/tasks/{first.task_id}")


def test_what_is_not_done_in_time_is_answered_by_its_task(ask: Ask, job_id: str, services: Services) -> None:
    late = ask("POST", f"/v1/jobs/{job_id}/verify?wait=0.3")
    assert (late.status_code, status_of(late).state) == (202, TaskState.QUEUED)
    assert late.headers["Location"] == f"/v1/tasks/{status_of(late).task_id}"
    services.settings = replace(services.settings, verify_timeout_s=0.2)
    assert ask("POST", f"/v1/jobs/{job_id}/verify?wait=3600").status_code == 202, "the operator's bound is shorter"
    services.closing.set()
    services.settings = replace(services.settings, verify_timeout_s=600.0)
    assert ask("POST", f"/v1/jobs/{job_id}/verify?wait=3600").status_code == 202, "a gateway that ends waits no longer"
    ask("DELETE", f"/v1/tasks/{status_of(late).task_id}")
    for wrong in ("wait=-1", "wait=nan", "wait=1e9", "wait=soon"):
        assert ask("POST", f"/v1/jobs/{job_id}/verify?{wrong}").json()["field"] == "wait"


def test_a_key_asks_cancels_and_fetches_by_its_scope(task_stack: TaskStack, tmp_path: Path, job_id: str) -> None:
    keys = tmp_path / "keys"
    lines = [f"{name} {scope} {hashlib.sha256(name.encode()).hexdigest()}" for name, scope in KEYS]
    keys.write_text("\n".join(lines))
    # The key of each is its name.
    reads, submits, manages = (name for name, _ in KEYS)
    with task_stack.services(keys_file=str(keys)) as services:
        app = create_app(services)

        def code(key: str, method: str, path: str) -> int:
            return asked(app, method, path, key=key).status_code

        assert code(reads, "POST", f"/v1/jobs/{job_id}/verify") == 403
        assert code(submits, "POST", f"/v1/jobs/{job_id}/export") == 403, "the job is the operator's"
        check = status_of(asked(app, "POST", f"/v1/jobs/{job_id}/verify", key=submits))
        assert check.who == "ben"
        assert code(reads, "GET", f"/v1/tasks/{check.task_id}") == 200
        assert code(reads, "DELETE", f"/v1/tasks/{check.task_id}") == 403
        assert code(submits, "DELETE", f"/v1/tasks/{check.task_id}") == 200
        export = status_of(asked(app, "POST", f"/v1/jobs/{job_id}/export", key=manages))
        refused = asked(app, "DELETE", f"/v1/tasks/{export.task_id}", key=submits)
        assert refused.status_code == 403
        problem = f"task {export.task_id} was asked for by root, and the key of ben can't cancel it"
        assert refused.json()["detail"] == problem
        for key in (reads, submits):
            assert code(key, "GET", f"/v1/tasks/{export.task_id}/files") == 403, "weights leave with them"
        assert code(manages, "GET", f"/v1/tasks/{export.task_id}/files") == 409
        assert code(manages, "DELETE", f"/v1/tasks/{export.task_id}") == 200


def test_an_export_goes_to_the_gateway_s_host_where_hosts_share_no_folder(
    task_stack: TaskStack, job_id: str, tmp_path: Path
) -> None:
    with task_stack.services(objects=f"file://{tmp_path}") as services:
        ask = ask_of(services)
        refused = ask("POST", f"/v1/jobs/{job_id}/export")
        assert (refused.status_code, refused.json()["field"]) == (503, "export")
        assert "runs on the gateway's host" in refused.json()["detail"]
        assert "onbeat.tasks files" in refused.json()["cure"]
        presence = TaskPresence(task_stack.broker)
        presence.beat(TaskWorkerSeen(worker_id="far", host="far", queues=("files", "files@far")))
        assert ask("POST", f"/v1/jobs/{job_id}/export").status_code == 503, "one elsewhere can't give the files out"
        own = queue_of_host(TaskQueue.FILES, socket.gethostname())
        presence.beat(TaskWorkerSeen(worker_id="near", host=socket.gethostname(), queues=("files", own)))
        status = status_of(ask("POST", f"/v1/jobs/{job_id}/export"))
        assert (status.queue, status.reason) == (own, "")
        for worker_id in ("far", "near"):
            presence.leave(worker_id)
        waits = status_of(ask("GET", f"/v1/tasks/{status.task_id}")).reason
        assert waits.startswith(
            f"waits for a worker of the queue files on {own.partition('@')[2]}, but none is running"
        )
        ask("DELETE", f"/v1/tasks/{status.task_id}")


def done_export(stack: TaskStack, job_id: str, **changes: object) -> TaskStatus:
    """A task whose result speaks of one file."""
    attempt = stack.begun(TaskKind.EXPORT, TaskArguments(job_id=job_id), who="the operator")
    exported = ExportedFiles(
        policy_version=1,
        weights_digest=DIGEST,
        files_digest=DIGEST,
        source="there",
        files={"model.safetensors": 3},
        num_bytes=3,
        until_s=time.time() + 60.0,
        host="far",
    )
    result = TaskResult(exported=replace(exported, **changes))
    stack.tasks.end(attempt, TaskState.DONE, progress=TaskProgress(), result=result)
    return stack.tasks.status(attempt.task_id)


def test_files_that_are_not_here_say_where_they_are(ask: Ask, task_stack: TaskStack, job_id: str) -> None:
    def refusal(status: TaskStatus, code: int = 404) -> str:
        answer = ask("GET", f"/v1/tasks/{status.task_id}/files")
        assert answer.status_code == code, answer.text
        assert answer.json()["cure"]
        return answer.json()["detail"]

    assert "the export is on the host far, and not in" in refusal(done_export(task_stack, job_id))
    over = done_export(task_stack, job_id, until_s=1_700_000_000.0)
    assert refusal(over) == "the export was kept until 2023-11-14 22:13 UTC"
    changed = done_export(task_stack, job_id)
    assert changed.result is not None
    assert changed.result.exported
    folder = folder_of(task_stack.settings("gateway"), changed.task_id, changed.result.exported)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"four")
    assert "is no file of 3 bytes any more" in refusal(changed)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/passwd")
    assert "the export isn't as it was written" in refusal(changed)
    check = task_stack.begun(TaskKind.VERIFY, TaskArguments(job_id=job_id), who="the operator")
    assert "writes no files" in refusal(task_stack.tasks.status(check.task_id))
    task_stack.tasks.end(check, TaskState.FAILED, reason="for this test")
    waits = status_of(ask("POST", f"/v1/jobs/{job_id}/export"))
    assert refusal(waits, 409) == "the export is queued"
    ask("DELETE", f"/v1/tasks/{waits.task_id}")
    ended = ask("DELETE", f"/v1/tasks/{check.task_id}")
    assert (ended.status_code, ended.json()["detail"]) == (409, "a task that is failed cannot be cancelled")
