"""Keys of jobs whose time in Redis is over: the gateway may remove them, and does when their run folder has all of it.

Consumes:     ended jobs, and what consumers put aside of them in the run folders.
Waits for:    FORGET_EVERY_S, again and again.
Unblocked by: the gateway's end.
Produces:     jobs that Redis has forgotten, and notes for consumers that what was put aside is final now.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from starlette.concurrency import run_in_threadpool

from broker.retention import DueJob, due_jobs, is_all_of
from contracts.errors import Conflict, ContractViolation, InvalidInput, NotFound, OnbeatError
from contracts.run_folder import RunFolder
from gateway.services import Services
from onbeat.audit.folder import read_audit_file

FORGET_EVERY_S = 60.0

log = logging.getLogger(__name__)


async def forget_again_and_again(services: Services) -> None:
    """Until the gateway ends. An error ends the attempt alone."""
    while not services.closing.is_set():
        try:
            if await run_in_threadpool(forget_due, services):
                await run_in_threadpool(services.sweep)
        except OnbeatError as error:
            log.warning("cannot look at ended jobs now: %s", error)
        with suppress(TimeoutError):
            await asyncio.wait_for(services.closing.wait(), timeout=FORGET_EVERY_S)


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
    try:
        stored = read_audit_file(folder.audit_aside)
    except (NotFound, InvalidInput):
        return False
    return is_all_of(services.broker, due, stored.status, [(one.record, one.digest) for one in stored.entries])
