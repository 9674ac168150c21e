"""What a gateway does for jobs that have ended: their keys go for good.

The gateway may not write to the run root: a worker removes what is noted here.

Keys of jobs whose time in Redis is over the gateway may remove, and does when their run folder has all of it:

Consumes:     ended jobs, and what workers put aside of them in the run folders.
Waits for:    nothing: it is called once a minute.
Unblocked by: nothing.
Produces:     jobs that Redis has forgotten, and notes for workers that what was put aside is final now.
"""

from __future__ import annotations

import logging
import time
from http import HTTPStatus

from fastapi import APIRouter, Response

from contracts.encoding.names import MADE_HERE
from contracts.errors import Conflict, ContractViolation, NotFound
from contracts.run_folder import Removal, RunFolder
from gateway.services import BRING_S, HasServices, OwnJob, Services
from onbeat.run_files import run_files
from onbeat_extras.retention.due_jobs import DueJob, due_jobs, is_put_aside
from onbeat_extras.retention.removals import Removals

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.delete("/{job_id}", status_code=HTTPStatus.NO_CONTENT, responses={204: {"description": "It is gone"}})
def delete_job(job_id: OwnJob, services: HasServices) -> Response:
    """Delete an ended job for good: its keys, its audit chain, its run folder with weights and checkpoints.

    204 says that its keys are gone, and that the removal of its files is recorded on disk: a consumer removes them, at
    once where one lives. Repeating it changes nothing. 409 for a job that has not ended.
    """
    remove_for_good(services, job_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


def remove_for_good(services: Services, job_id: str) -> None:
    """Removes the job's keys, and notes that its files are to go; also of one whose files alone are left.

    Repeating it changes nothing while the note stands. Raises NotFound, and Conflict for a job that has not ended, or
    from which one goes on that has not.
    """
    for fork, version in services.jobs.forks_of(job_id).items():
        raise Conflict(
            f"job {fork} goes on from version {version} of {job_id}", cure="let it end, or cancel it, before"
        )
    try:
        services.jobs.remove(job_id)
    except NotFound:
        removals = Removals(services.broker)
        # An ended job that Redis has forgotten left its audit chain among its files.
        is_left = MADE_HERE.fullmatch(job_id) and services.run_folder(job_id, below="audit.json").audit.is_file()
        if not is_left and not removals.is_pending(job_id):
            raise
        removals.note(job_id, Removal(files="removed", at_s=time.time()))
    log.info("job %s is removed, and its files are to be", job_id)


def forget_due(services: Services) -> list[str]:
    """Removes the keys of each ended job that is due and whose run folder holds its chain; their ids.

    Raises Unavailable.
    """
    forgotten: list[str] = []
    for due in due_jobs(services.broker, services.settings):
        try:
            if not _stands_alone(services, RunFolder(services.settings.run_root_path, due.job_id), due):
                continue
            services.jobs.remove(due.job_id, as_seen=(due.ended_s, due.num_records))
        except (Conflict, NotFound, ContractViolation) as error:
            log.info("%s is not forgotten: %s", due.job_id, error)
        else:
            log.info("Redis has forgotten %s: its audit chain is in its run folder", due.job_id)
            forgotten.append(due.job_id)
    return forgotten


def _stands_alone(services: Services, folder: RunFolder, due: DueJob) -> bool:
    """Whether the run folder holds the chain and the status as they are; one that trained nothing may have no folder.

    Read back here, and not believed: the chain that is removed exists nowhere else.
    """
    if due.num_records == 0 and not folder.path.exists():
        return True
    run_files(services.settings, folder, deadline_s=BRING_S).bring(below=folder.audit_aside.name)
    return is_put_aside(services.broker, folder, due)
