"""The endpoints of tasks: verify and export begin one; they are listed, cancelled, and what was exported is streamed.

request ─▶ record (broker/task_store.py) ─▶ 202, with the task's path
                │└▶ message (messages.py), which may be lost
                └─ `?wait=`: looks at the record until it ended ─▶ the answer, or 202
                             └─ the client goes: the task that it created is cancelled
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool

from broker.presence import TaskPresence
from broker.task_store import TaskStore
from contracts.answers import AuditVerdict
from contracts.encoding.names import MADE_HERE, check_job_id
from contracts.encoding.wire import changed
from contracts.errors import Conflict, ContractViolation, InvalidInput, NotFound, OnbeatError, Unavailable
from contracts.monitor import TaskWorkerSeen
from contracts.tasks.kinds import OF_HOST, TaskKind, TaskQueue, TaskState, queue_of_host
from contracts.tasks.records import ExportedFiles, ExportRequest, TaskArguments, TaskList, TaskStatus
from gateway import openapi, submission
from gateway.services import HasCaller, HasServices, KnownJob, OwnJob, Services
from gateway.task_requests import CreatedTask, request_task
from onbeat.base.http.access import Caller
from onbeat.base.http.bodies import CLIENT_GONE, json_answer, while_connected
from onbeat.base.http.problems import Problem
from onbeat.base.http.tar_layout import MEDIA_TYPE, TarLayout, check_files, tar_bytes
from onbeat.tasks.exports import exports_of, folder_of

MAX_LISTED = 1000
MAX_WAIT_S = 86_400.0
FIRST_LOOK_S = 0.1
LAST_LOOK_S = 1.0
"""Pauses between two looks at a task that a client waits for: each is half as long again as the one before."""
PREFERRED_WAIT = re.compile(r"(?:^|[,;])\s*wait\s*=\s*\"?([0-9]{1,6})\"?\s*(?=$|[,;])")
"""`Prefer: wait=10` (RFC 7240)."""
FROM_BYTE = re.compile(r"bytes=([0-9]{1,18})-")
"""The one form of `Range` that is honoured: the rest of a download that broke off."""
STATUS = openapi.record(TaskStatus)
LOCATION = {"Location": {"description": "Path of the task", "schema": {"type": "string"}}}
BEGUN: dict[str, Any] = openapi.answer(STATUS, "The task, which waits or runs") | {"headers": LOCATION}
VERIFY: dict[str, Any] = {
    "responses": {
        202: BEGUN,
        200: openapi.answer(openapi.record(AuditVerdict), "With `wait`: whether the run holds, and each gap"),
    }
}
EXPORT: dict[str, Any] = {
    "responses": {202: BEGUN},
    "openapi_extra": openapi.takes(ExportRequest, required=False),
}
CANCEL: dict[str, Any] = {
    "responses": {
        200: openapi.answer(STATUS, "It is cancelled"),
        202: openapi.answer(STATUS, "It is asked to end, and ends within seconds"),
    }
}
TAR = openapi.answers({"type": "string", "format": "binary"}, "The files, uncompressed", media_type=MEDIA_TYPE)

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["tasks"])


@router.post("/jobs/{job_id}/verify", status_code=HTTPStatus.ACCEPTED, **VERIFY)
async def verify_job(
    request: Request,
    job_id: KnownJob,
    services: HasServices,
    caller: HasCaller,
    wait: Annotated[float, Query(ge=0.0, le=MAX_WAIT_S)] = 0.0,
) -> Response:
    """Have a worker of tasks check the audit chain again, and hash the weights that it sees on disk.

    With `wait`, or `Prefer: wait=`, in seconds, the answer is the verdict where the check is done by then. A client
    that goes away while it waits cancels the task that its request has created.
    """
    wait_s = min(max(wait, _preferred_wait_s(request)), services.settings.verify_timeout_s)
    arguments = TaskArguments(job_id=job_id)
    await run_in_threadpool(_check_has_record, services, job_id)
    task = await run_in_threadpool(request_task, services, TaskKind.VERIFY, arguments, who=caller.name)
    if wait_s == 0.0:
        return await run_in_threadpool(_begun, services, task)
    status = await while_connected(request, _awaited(services, task, arguments, caller.name, wait_s))
    if status is None:
        if task.is_new:
            await run_in_threadpool(_cancel_for_gone, services, task.task_id, caller.name)
        return Response(status_code=CLIENT_GONE)
    if not status.state.is_final:
        return await run_in_threadpool(_begun, services, task)
    return json_answer(_verdict(status), headers={"Location": _path(task.task_id)})


@router.post("/jobs/{job_id}/export", status_code=HTTPStatus.ACCEPTED, **EXPORT)
async def export_job(request: Request, job_id: OwnJob, services: HasServices, caller: HasCaller) -> Response:
    """Have a worker of tasks write a version as a folder that Hugging Face's libraries load, verified against the
    chain: the newest that is kept, `version`, or the one of the best held-out score.

    Once it is done, `GET /v1/tasks/{task_id}/files` streams the folder, for 24 hours. It needs a key that may change
    the job.
    """
    export = await submission.read_optional(request, ExportRequest, max_bytes=services.max_body_bytes)
    if export.best and export.version is not None:
        raise InvalidInput("names another version than `best` may", field="version", cure="leave one of them out")
    return await run_in_threadpool(_export, services, job_id, export, caller.name)


@router.get("/tasks", **openapi.answers(openapi.record(TaskList)))
def list_tasks(
    services: HasServices,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    job_id: Annotated[str, Query(max_length=64)] = "",
    state: Annotated[list[TaskState] | None, Query()] = None,
    kind: Annotated[list[TaskKind] | None, Query()] = None,
) -> Response:
    """List the newest tasks, newest first: those of a job, in one of the states, of one of the kinds."""

    def is_asked_for(status: TaskStatus) -> bool:
        return (
            (not job_id or status.arguments.job_id == job_id)
            and (not state or status.state in state)
            and (not kind or status.kind in kind)
        )

    live = TaskPresence(services.broker).live()
    tasks = TaskStore(services.broker).newest(limit, where=is_asked_for)
    return json_answer(TaskList(tasks=tuple(with_wait(status, live) for status in tasks)))


@router.get("/tasks/{task_id}", **openapi.answers(STATUS))
def get_task(task_id: str, services: HasServices) -> Response:
    """Show a task: its state, who asked for it, its progress, and its result once it is done."""
    return json_answer(status_of(services, task_id))


@router.delete("/tasks/{task_id}", **CANCEL)
def cancel_task(task_id: str, services: HasServices, caller: HasCaller) -> Response:
    """Cancel a task: one that waits at once, one that runs within seconds. Repeating it changes nothing.

    It needs the key that asked for the task, or one with the scope admin. 409 for a task that has ended otherwise.
    """
    store = TaskStore(services.broker)
    _check_own(store.status(task_id), caller, to="cancel it")
    status = store.cancel(task_id, by=caller.name)
    return json_answer(status, HTTPStatus.OK if status.state.is_final else HTTPStatus.ACCEPTED)


@router.get("/tasks/{task_id}/files", **TAR)
def task_files(request: Request, task_id: str, services: HasServices, caller: HasCaller) -> Response:
    """Stream the folder that an export has written, as an uncompressed tar of its files.

    `Range: bytes=N-` brings the rest of a download that broke off. It needs the key that asked for the export, or one
    with the scope admin.
    """
    status = TaskStore(services.broker).status(task_id)
    _check_own(status, caller, to="fetch what it wrote")
    exported = _exported(status)
    layout = TarLayout(exported.files)
    folder = _folder_here(services, status, exported)
    etag = f'"{task_id}-{exported.weights_digest[:16]}"'
    start = _first_byte(request, layout, etag=etag)
    name = f"{status.arguments.job_id}-v{exported.policy_version:06d}.tar"
    headers = {
        "Content-Length": str(layout.num_bytes - start),
        "Content-Disposition": f'attachment; filename="{name}"',
        "Accept-Ranges": "bytes",
        "ETag": etag,
    }
    if start:
        headers["Content-Range"] = f"bytes {start}-{layout.num_bytes - 1}/{layout.num_bytes}"
    return StreamingResponse(
        tar_bytes(folder, layout, start=start),
        status_code=HTTPStatus.PARTIAL_CONTENT if start else HTTPStatus.OK,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def status_of(services: Services, task_id: str) -> TaskStatus:
    """Returns a task as clients see it. Raises NotFound."""
    status = TaskStore(services.broker).status(task_id)
    return with_wait(status, TaskPresence(services.broker).live())


def with_wait(status: TaskStatus, live: Sequence[TaskWorkerSeen]) -> TaskStatus:
    """Returns the status; of a task that no live worker would begin, the reason says so, with the cure."""
    if status.state is not TaskState.QUEUED or any(status.queue in worker.queues for worker in live):
        return status
    queue, _, host = status.queue.partition(OF_HOST)
    why = (
        f"waits for a worker of the queue {queue}{f' on {host}' if host else ''}, but none is running: start one with "
        f"`onbeat up`, the service `tasks`, or `python -m onbeat.tasks {queue}`"
    )
    return changed(status, reason=f"{status.reason}; {why}" if status.reason else why)


def _path(task_id: str) -> str:
    return f"/v1/tasks/{task_id}"


def _begun(services: Services, task: CreatedTask) -> Response:
    headers = {"Location": _path(task.task_id)}
    return json_answer(status_of(services, task.task_id), HTTPStatus.ACCEPTED, headers=headers)


def _check_has_record(services: Services, job_id: str) -> None:
    if not services.jobs.audit(job_id, last=1):
        raise Conflict("nothing was committed yet, so there is nothing to verify", field="state")


async def _awaited(
    services: Services, task: CreatedTask, arguments: TaskArguments, who: str, wait_s: float
) -> TaskStatus:
    """Returns the task's status once it has ended, once the time is over, or when the gateway ends.

    A task that the request has joined may be cancelled by the client that created it: then one of its own is created,
    and `task` becomes that.
    """
    until_s = time.monotonic() + wait_s
    pause_s = FIRST_LOOK_S
    while True:
        status = await run_in_threadpool(TaskStore(services.broker).status, task.task_id)
        left_s = until_s - time.monotonic()
        if left_s <= 0 or services.closing.is_set():
            return status
        if status.state is TaskState.CANCELLED and not task.is_new:
            own = await run_in_threadpool(request_task, services, TaskKind.VERIFY, arguments, who=who)
            task.task_id, task.is_new = own.task_id, own.is_new
            continue
        if status.state.is_final:
            return status
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(LAST_LOOK_S, 1.5 * pause_s)


def _preferred_wait_s(request: Request) -> float:
    preferred = PREFERRED_WAIT.search(",".join(request.headers.getlist("prefer")))
    return float(preferred[1]) if preferred else 0.0


def _cancel_for_gone(services: Services, task_id: str, who: str) -> None:
    """Cancels the task of a client that has gone. One that has ended meanwhile stays as it is."""
    try:
        TaskStore(services.broker).cancel(task_id, by=who)
    except OnbeatError as error:
        log.info("task %s of a client that has gone is not cancelled: %s", task_id, error)


def _verdict(status: TaskStatus) -> AuditVerdict:
    """Returns the verdict of a task that has ended. Raises Problem and Conflict for one that has none."""
    cure = f"`onbeat jobs --tasks {status.task_id}` shows it"
    if status.state is TaskState.CANCELLED:
        raise Conflict(f"the check was cancelled: {status.reason}", field="state", cure=cure)
    if status.result is None or status.result.verdict is UNSET:
        raise Problem(HTTPStatus.BAD_GATEWAY, f"the check failed: {status.reason}", field="verify", cure=cure)
    return status.result.verdict


def _export(services: Services, job_id: str, export: ExportRequest, who: str) -> Response:
    """Creates the task of an export, and answers with its status."""
    _check_kept(services, job_id)
    arguments = TaskArguments(job_id=job_id, version=export.version, best=export.best, adapters=export.adapters)
    task = request_task(services, TaskKind.EXPORT, arguments, who=who, queue=_queue_of_export(services))
    return _begun(services, task)


def _check_kept(services: Services, job_id: str) -> None:
    """Raises NotFound for a job that Redis doesn't know and that left no audit chain among its files."""
    try:
        services.jobs.state(check_job_id(job_id))
    except NotFound:
        if not MADE_HERE.fullmatch(job_id) or not services.run_folder(job_id, below="audit.json").audit.is_file():
            raise


def _queue_of_export(services: Services) -> str:
    """Returns the queue of an export; "" is the one of all hosts.

    Where hosts share no run root, what a worker writes is read by the gateway of its own host alone. Raises
    Unavailable where none lives there.
    """
    if not services.settings.objects:
        return ""
    host = socket.gethostname()
    queue = queue_of_host(TaskQueue.FILES, host)
    if any(queue in worker.queues for worker in TaskPresence(services.broker).live()):
        return queue
    raise Unavailable(
        f"no worker of the queue files runs on the gateway's host {host}, which alone could give the files out",
        field="export",
        cure="start one there, over the gateway's run root: `python -m onbeat.tasks files`",
    )


def _check_own(status: TaskStatus, caller: Caller, *, to: str) -> None:
    """Raises Problem (403) unless the caller asked for the task, or has the scope admin."""
    if caller.may_change_all or caller.name == status.who:
        return
    raise Problem(
        HTTPStatus.FORBIDDEN,
        f"task {status.task_id} was asked for by {status.who}, and the key of {caller.name} can't {to}",
        field="Authorization",
        cure=f"use the key of {status.who}, or one with the scope admin",
    )


def _exported(status: TaskStatus) -> ExportedFiles:
    """Returns what the task has exported. Raises NotFound, and Conflict for one that isn't done."""
    if status.kind is not TaskKind.EXPORT:
        raise NotFound(
            f"a task of the kind {status.kind.value} writes no files for clients",
            field="task_id",
            cure="`GET /v1/tasks?kind=export` lists those that do",
        )
    if status.state is not TaskState.DONE or status.result is None or status.result.exported is UNSET:
        why = f": {status.reason}" if status.reason else ""
        cure = "ask again once it is done"
        if status.state.is_final:
            cure = "export again"
        raise Conflict(f"the export is {status.state.value}{why}", field="state", cure=cure)
    return status.result.exported


def _folder_here(services: Services, status: TaskStatus, exported: ExportedFiles) -> Path:
    """Returns the folder of an export. Raises NotFound where it is over, elsewhere or damaged."""
    if time.time() >= exported.until_s:
        until = f"{datetime.fromtimestamp(exported.until_s, UTC):%Y-%m-%d %H:%M} UTC"
        raise NotFound(f"the export was kept until {until}", field="task_id", cure="export again")
    folder = folder_of(services.settings, status.task_id, exported)
    if not folder.is_dir():
        raise NotFound(
            f"the export is on the host {exported.host}, and not in {exports_of(services.settings)} as this gateway "
            "sees it",
            field="task_id",
            cure="give gateway and workers of the queue files one run root, and export again",
        )
    try:
        check_files(folder, exported.files)
    except (OSError, ContractViolation) as error:
        raise NotFound(f"the export isn't as it was written: {error}", field="task_id", cure="export again") from error
    return folder


def _first_byte(request: Request, layout: TarLayout, *, etag: str) -> int:
    """Returns from which byte on the client asks for the tar. Raises Problem (416) for one behind its end.

    Another form of `Range`, and one of another tar (`If-Range`), is answered by the whole, as RFC 9110 allows.
    """
    from_byte = FROM_BYTE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if from_byte is None or request.headers.get("if-range", etag) != etag:
        return 0
    start = int(from_byte[1])
    if start >= layout.num_bytes:
        problem = f"the tar has {layout.num_bytes} bytes"
        raise Problem(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, problem, field="Range")
    return start
