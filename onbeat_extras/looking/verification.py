"""A check of a job's audit chain and weights, in a process of its own: it takes time, and a version's memory.

request ─▶ chain, spec and state from the broker ─▶ check_process.py ─▶ verdict
                                                        └─ killed at the deadline, with its client, with the gateway
"""

from __future__ import annotations

import asyncio
import os
import sys
from http import HTTPStatus

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from contracts.answers import AuditVerdict, ProblemDetails
from contracts.encoding.wire import decode_json, encode
from contracts.errors import DeadlineExceeded, Unavailable
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.settings import PREFIX
from gateway.services import Services
from onbeat.audit.chain import AuditEntry
from onbeat.http_service.bodies import while_connected
from onbeat.http_service.problems import Problem
from onbeat.process.launcher import with_own_packages
from onbeat_extras.looking import check_process
from onbeat_extras.looking.check_process import REFUSED, AuditTask

COMMAND = (sys.executable, "-m", check_process.__name__)
MAX_AT_ONCE = 2
"""Each may take the memory of a version, and a core."""
RUNNING: set[object] = set()
"""This process' checks; the event loop's thread alone touches it."""


async def verify(request: Request, services: Services, job_id: str) -> AuditVerdict | None:
    """Returns None once the client has gone.

    Raises Unavailable where others run or the check died, DeadlineExceeded, and Problem as the check says.
    """
    if len(RUNNING) >= MAX_AT_ONCE:
        raise Unavailable(f"{MAX_AT_ONCE} checks run already", field="verify", cure="ask again when one is done")
    place = object()
    RUNNING.add(place)
    try:
        return await while_connected(request, _verify(services, job_id))
    finally:
        RUNNING.remove(place)


async def _verify(services: Services, job_id: str) -> AuditVerdict:
    task = encode(await run_in_threadpool(_task, services, job_id))
    settings = services.settings
    roots = (str(settings.run_root_path), str(settings.weight_root_path))
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, *roots, job_id),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The gateway's environment without its settings: the check needs no key and no address.
        env=with_own_packages({name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(task), settings.verify_timeout_s)
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"the check of {job_id} is not done after {settings.verify_timeout_s:.0f} s",
            field="verify",
            cure="raise ONBEAT_VERIFY_TIMEOUT_S of the gateway, or verify where the run folder is: `onbeat verify`",
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return _answer(process.returncode, output)


def _task(services: Services, job_id: str) -> AuditTask:
    services.run_folder(job_id)
    jobs = services.jobs
    records = jobs.audit(job_id)
    return AuditTask(
        spec=jobs.spec(job_id),
        is_complete=jobs.state(job_id) is JobState.SUCCEEDED,
        entries=tuple(AuditEntry(record=record, digest=record_digest(record)) for record in records),
    )


def _answer(exit_code: int | None, output: bytes) -> AuditVerdict:
    if exit_code == 0:
        return decode_json(output, AuditVerdict)
    if exit_code == REFUSED and output:
        problem = decode_json(output, ProblemDetails)
        raise Problem(HTTPStatus(problem.status), problem.detail, field=problem.field, cure=problem.cure)
    how = f"was killed by signal {-exit_code}" if exit_code and exit_code < 0 else f"ended with code {exit_code}"
    raise Unavailable(
        f"the process of the check {how}",
        field="verify",
        cure="give the gateway more memory, or verify where the run folder is: `onbeat verify`",
    )
