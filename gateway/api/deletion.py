"""The endpoint that deletes a job: its keys go at once, and a task removes its files.

The gateway may not write to the run root, so a worker of tasks does.

Consumes:     requests to delete an ended job.
Waits for:    nothing.
Unblocked by: nothing.
Produces:     jobs that Redis has forgotten, notes for workers of tasks, and a task that begins with one.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from fastapi import APIRouter, Response

from broker.removals import Removals
from contracts.encoding.names import MADE_HERE
from contracts.errors import Conflict, NotFound, OnbeatError
from contracts.run_folder import Removal
from contracts.tasks.kinds import TaskKind
from contracts.tasks.records import TaskArguments
from gateway.services import HasCaller, HasServices, OwnJob, Services
from gateway.task_requests import request_task

TASK_HEADER = "Onbeat-Task"
"""Names the task that an answer has begun beside what it says."""

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.delete("/{job_id}", status_code=HTTPStatus.NO_CONTENT, responses={204: {"description": "It is gone"}})
def delete_job(job_id: OwnJob, services: HasServices, caller: HasCaller) -> Response:
    """Delete an ended job for good: its keys, its audit chain, its run folder with weights and checkpoints.

    204 says that its keys are gone, and that the removal of its files is recorded on disk: a task, which the header
    `Onbeat-Task` names, removes them as soon as a worker of tasks takes it. Repeating it changes nothing. 409 for a job
    that has not ended.
    """
    remove_for_good(services, job_id)
    task_id = _begin_removal(services, job_id, who=caller.name)
    return Response(status_code=HTTPStatus.NO_CONTENT, headers={TASK_HEADER: task_id} if task_id else {})


def _begin_removal(services: Services, job_id: str, *, who: str) -> str:
    """Has the files removed soon, and returns the task's id.

    "" where no task can be created now: the clock's task `remove_files` finds the note of the removal later.
    """
    try:
        return request_task(services, TaskKind.DELETE, TaskArguments(job_id=job_id), who=who).task_id
    except OnbeatError as error:
        log.warning("the files of %s go with the next removal of files: %s", job_id, error)
        return ""


def remove_for_good(services: Services, job_id: str) -> None:
    """Removes the job's keys, and notes that its files are to go; also of one whose files alone are left.

    Repeating it changes nothing while the note stands. Raises NotFound, and Conflict for a job that has not ended, or
    from which one goes on that has not.
    """
    for fork, version in services.jobs.forks_of(job_id).items():
        raise Conflict(
            f"job {fork} goes on from version {version} of {job_id}",
            cure="wait for that job to end, or cancel it; then delete",
        )
    try:
        services.jobs.remove(job_id)
    except NotFound:
        removals = Removals(services.broker)
        # Redis doesn't know the job of a folder that a private stack has left, or whose Redis is lost: its audit chain
        # among the files says that it has ended.
        is_left = MADE_HERE.fullmatch(job_id) and services.run_folder(job_id, below="audit.json").audit.is_file()
        if not is_left and not removals.is_pending(job_id):
            raise
        removals.note(job_id, Removal(at_s=time.time()))
    log.info("job %s is removed, and its files are to be", job_id)
