"""The routes of jobs: create, list, show, cancel and resume. Version 1.

Plain functions run in the thread pool: the broker's calls block.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from broker.connection.client import Broker
from broker.job_search import find_jobs
from broker.monitor import job_status
from broker.presence import ConsumerPresence, Presence
from contracts.answers import SpecCheck
from contracts.errors import Conflict, ContractViolation, NotFound, SpecRefused
from contracts.jobs import JobState, JobStatus, ResumeRequest
from contracts.settings import OPERATOR
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading
from contracts.spec.rules import refusals_of
from gateway import openapi, submission
from gateway.named_files import check_named_files
from gateway.services import HasCaller, HasServices, KnownJob, OwnJob, Services
from onbeat.base.http.bodies import json_answer
from onbeat.hub.spec_names import may_name_hub

MAX_LISTED = 1000
EXAMPLE_JOB = {
    "name": "addition",
    "iterations": 30,
    "model": {"path": "configs/models/two-digit-addition"},
    "dataset": {"type": "addition"},
    "reward": {"components": [{"type": "exact"}]},
    "rollout": {"batches_per_iteration": 4, "prompts_per_batch": 4, "group_size": 4, "sampling": {"max_new_tokens": 6}},
}
LOCATION = {"Location": {"description": "Path of the job", "schema": {"type": "string"}}}
IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same key and spec answer the same job, for 24 hours",
    "schema": {"type": "string", "pattern": r"^[\x21-\x7e]{1,200}$"},
}
JOB = openapi.record(JobStatus)
SUBMIT: dict[str, Any] = {
    "responses": {
        201: openapi.answer(JOB, "The new job") | {"headers": LOCATION},
        200: openapi.answer(JOB, "The job that this Idempotency-Key made before") | {"headers": LOCATION},
    },
    "openapi_extra": {
        **openapi.takes(JobSpec, required=True, examples={"the demo's model": {"value": EXAMPLE_JOB}}),
        "parameters": [IDEMPOTENCY_KEY],
    },
}
CHECK: dict[str, Any] = openapi.answers(openapi.record(SpecCheck), "A submission would take it") | {
    "openapi_extra": openapi.takes(JobSpec, required=True)
}
STATUS: dict[str, Any] = openapi.answers(JOB, "Its status now")
RESUME: dict[str, Any] = STATUS | {"openapi_extra": openapi.takes(ResumeRequest, required=False)}

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("", status_code=HTTPStatus.CREATED, **SUBMIT)
async def submit(request: Request, services: HasServices, caller: HasCaller) -> Response:
    """Create a job from a JobSpec. The same `Idempotency-Key` and spec answer the same job, with status 200."""
    key = submission.idempotency_key(request)
    reading = await submission.read_spec(request, max_bytes=services.max_body_bytes)
    status, is_new = await run_in_threadpool(_create, services, reading, key, caller.name)
    return json_answer(
        status, HTTPStatus.CREATED if is_new else HTTPStatus.OK, headers={"Location": f"/v1/jobs/{status.job_id}"}
    )


@router.post("/check", **CHECK)
async def check(request: Request, services: HasServices, caller: HasCaller) -> Response:
    """Check a JobSpec as a submission does, and create nothing: what that would refuse is refused here too.

    Of a name of the hub that a submission would fetch first, nothing is fetched, and nothing more is checked.
    """
    reading = await submission.read_spec(request, max_bytes=services.max_body_bytes)
    await run_in_threadpool(_checked, services, reading, who=caller.name, begins=False)
    return json_answer(SpecCheck(valid=True))


@router.get("", **openapi.answers(openapi.list_of("JobList", "jobs", JOB)))
def list_jobs(
    services: HasServices,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    state: Annotated[list[JobState] | None, Query()] = None,
    name: Annotated[str, Query(max_length=256)] = "",
) -> Response:
    """List the newest jobs, newest first: those in one of the states that are given, with the text in their names."""
    statuses = newest_jobs(services.broker, limit=limit, states=state or (), name=name)
    return json_answer({"jobs": [services.disk.with_size_and_folder(status) for status in statuses]})


@router.get("/{job_id}", **STATUS)
def get_job(job_id: KnownJob, services: HasServices) -> Response:
    """Show a job's status."""
    return json_answer(services.disk.with_size_and_folder(job_status(services.broker, job_id)))


@router.post("/{job_id}/cancel", **STATUS)
def cancel(job_id: OwnJob, services: HasServices, caller: HasCaller) -> Response:
    """Cancel a job: a queued one at once, a running one after its trainer's micro-batch and a checkpoint.

    Repeating it changes nothing; a job that succeeded or failed answers 409.
    """
    state = services.jobs.request_cancel(job_id, by=caller.name)
    if state in (JobState.SUCCEEDED, JobState.FAILED):
        raise Conflict(f"a {state.value} job cannot be cancelled", field="state")
    return json_answer(job_status(services.broker, job_id))


@router.post("/{job_id}/resume", **RESUME)
async def resume(request: Request, job_id: OwnJob, services: HasServices, caller: HasCaller) -> Response:
    """Queue a job that failed or was cancelled again: a trainer goes on from its newest checkpoint.

    With `iterations`, the job is given another number of them; one that succeeded can be given more. `on_unscorable`
    says what completions get from now on that a reward component can't score, `on_failure` the same of the environment
    ("environment") and of stages, by their names. A job that is queued already answers its status; one that runs
    answers 409.
    """
    change = await submission.read_resume(request, max_bytes=services.max_body_bytes)
    return json_answer(await run_in_threadpool(_resume, services, job_id, change, caller.name))


def _create(services: Services, reading: SpecReading, key: str, owner: str) -> tuple[JobStatus, bool]:
    """Returns the job's status, and True if it is new. Raises Problem, InvalidInput, Conflict or Unavailable."""
    settings = services.settings
    accepted = submission.with_matmul(_checked(services, reading, who=owner), settings)
    spec = reading.whole
    job_id, is_new = services.jobs.create(
        accepted,
        owner=owner,
        idempotency_key=key,
        submitted=spec,
        max_jobs=settings.max_jobs,
        max_spec_bytes=settings.max_specs_mb * 2**20,
        # In a stack without other keys all people have the operator's: it has the bounds of all jobs alone.
        max_own_jobs=None if owner == OPERATOR else settings.max_key_jobs,
        max_own_spec_bytes=None if owner == OPERATOR else settings.max_key_specs_mb * 2**20,
    )
    if is_new:
        services.metrics.jobs_created.inc()
        log.info("job %s (%s) of %s is queued", job_id, spec.name, owner)
    return job_status(services.broker, job_id), is_new


def _checked(services: Services, reading: SpecReading, *, who: str, begins: bool = True) -> JobSpec:
    """Returns the spec as a job has it: with the commits of names of the hub, and texts and digests of its files.

    Args:
        services: The gateway's.
        reading: What could be read of the client's spec.
        who: The name of the client's key.
        begins: False fetches nothing from the hub.

    Raises:
        SpecRefused: A key is wrong, or the judge or the stack refuses it, with all refusals.
        Unavailable: A service doesn't answer, or what it names is being fetched.
    """
    refusals = refusals_of(reading)
    spec = reading.spec
    if spec is None or (refusals and may_name_hub(reading.plain)):
        # Nothing is fetched for it, and without its files the stack can't say more.
        raise SpecRefused(refusals)
    if not refusals:
        whole = submission.with_commits(spec, services.hub, who=who, begins=begins)
        if whole is None:
            return spec
        spec = whole
    accepted = submission.ask_stack(
        spec,
        refusals,
        settings=services.settings,
        jobs=services.jobs,
        generators=Presence(services.broker).live(),
        consumers=ConsumerPresence(services.broker).live(),
        unread=reading.unread,
    )
    if refusals:
        raise SpecRefused(refusals)
    return accepted


def _resume(services: Services, job_id: str, change: ResumeRequest, who: str) -> JobStatus:
    """Queues a job again and returns its status.

    Raises NotFound, Conflict, SpecRefused, InvalidInput or Unavailable.
    """
    if services.jobs.state(job_id).is_final:
        spec = services.jobs.spec(job_id)
        submission.check_environments(spec, services.settings, ConsumerPresence(services.broker).live())
        # Its names are at commits, so that what was removed meanwhile comes back as it was.
        submission.with_commits(spec, services.hub, who=who)
        check_named_files(spec, services.settings)
    changes = services.jobs.resume(job_id, change, by=who)
    log.info("job %s is queued again by %s: %s", job_id, who, "; ".join(changes) or "its spec stays")
    return job_status(services.broker, job_id)


def newest_jobs(broker: Broker, *, limit: int, states: Collection[JobState] = (), name: str = "") -> list[JobStatus]:
    """Returns the statuses of the newest jobs, newest first.

    A job whose record or spec can't be read is left out, and hides no other.

    Args:
        limit: The most jobs that are looked at.
        states: As for `find_jobs`.
        name: As for `find_jobs`.
    """
    generators = Presence(broker).live()
    statuses = []
    for job_id in find_jobs(broker, states=states, name=name)[:limit]:
        try:
            statuses.append(job_status(broker, job_id, generators=generators))
        except NotFound:
            log.warning("%s is listed and has no record: the server lost it", job_id)
        except ContractViolation as error:
            log.warning("%s is left out of the list, its spec can't be read: %s", job_id, error)
    return statuses
