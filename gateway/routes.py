"""The job API, version 1. Plain functions run in the thread pool: the broker's calls block."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import to_builtins
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool

from broker.monitor import job_status, stream_report
from broker.presence import Presence
from contracts.encoding.names import check_job_id
from contracts.encoding.wire import encode_json
from contracts.errors import Conflict, NotFound, Unavailable
from contracts.events import record_digest
from contracts.jobs import JobState, JobStatus, ResumeRequest
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.spec_tables.reasoning_tasks import check_job
from gateway import openapi, submission
from gateway.event_stream import CountedStream, EventStream, resume_point
from gateway.job_gauges import job_gauges
from gateway.reward_plugins import check_plugins
from gateway.run_files import iteration_metrics
from gateway.services import Services

MAX_LISTED = 1000

log = logging.getLogger(__name__)
jobs_api = APIRouter(prefix="/v1/jobs", tags=["jobs"])
process_api = APIRouter(tags=["process"])


def services_of(request: Request) -> Services:
    return request.app.state.services


def known_job(job_id: str, services: Annotated[Services, Depends(services_of)]) -> str:
    """Raises NotFound; an id of another form is looked up nowhere."""
    check_job_id(job_id)
    services.jobs.state(job_id)
    return job_id


HasServices = Annotated[Services, Depends(services_of)]
KnownJob = Annotated[str, Depends(known_job)]


@jobs_api.post("", status_code=HTTPStatus.CREATED, **openapi.SUBMIT)
async def submit(request: Request, services: HasServices) -> Response:
    """Create a job from a JobSpec. The same `Idempotency-Key` and spec answer the same job, with status 200."""
    key = submission.idempotency_key(request)
    spec = await submission.read_spec(request, max_bytes=services.max_body_bytes)
    status, is_new = await run_in_threadpool(_create, services, spec, key)
    return _json(
        status,
        HTTPStatus.CREATED if is_new else HTTPStatus.OK,
        headers={"Location": f"/v1/jobs/{status.job_id}"},
    )


@jobs_api.get("", **openapi.JOBS)
def list_jobs(services: HasServices, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100) -> Response:
    """The newest jobs, newest first."""
    live_generators = len(Presence(services.broker).live())
    found = []
    for job_id in services.jobs.job_ids()[:limit]:
        try:
            found.append(job_status(services.broker, job_id, live_generators=live_generators))
        except NotFound:
            log.warning("%s is listed and has no record: the server lost it", job_id)
    return _json({"jobs": found})


@jobs_api.get("/{job_id}", **openapi.JOB)
def get_job(job_id: KnownJob, services: HasServices) -> Response:
    """A job's status."""
    return _json(job_status(services.broker, job_id))


@jobs_api.delete("/{job_id}", status_code=HTTPStatus.NO_CONTENT, **openapi.REMOVE)
def remove(job_id: KnownJob, services: HasServices) -> Response:
    """Forget an ended job, its events and its audit chain; 409 for one that has not ended. Its run folder stays."""
    services.jobs.remove(job_id)
    log.info("job %s is removed", job_id)
    return Response(status_code=HTTPStatus.NO_CONTENT)


@jobs_api.post("/{job_id}/cancel", **openapi.JOB)
def cancel(job_id: KnownJob, services: HasServices) -> Response:
    """Cancel a job: a queued one at once, a running one after its trainer's micro-batch and a checkpoint.

    Repeating it changes nothing; a job that succeeded or failed answers 409.
    """
    state = services.jobs.request_cancel(job_id)
    if state in (JobState.SUCCEEDED, JobState.FAILED):
        raise Conflict(f"a {state.value} job cannot be cancelled", field="state")
    services.ensure_trainer(job_id)
    return _json(job_status(services.broker, job_id))


@jobs_api.post("/{job_id}/resume", **openapi.RESUME)
async def resume(request: Request, job_id: KnownJob, services: HasServices) -> Response:
    """Queue a job that failed or was cancelled again: a trainer goes on from its newest checkpoint.

    With `iterations`, the job is given another number of them; one that succeeded can be given more. `on_unscorable`
    says what completions get from now on that a reward component can't score. A job that is
    queued already answers its status; one that runs answers 409.
    """
    asked = await submission.read_resume(request, max_bytes=services.max_body_bytes)
    return _json(await run_in_threadpool(_resume, services, job_id, asked))


@jobs_api.get("/{job_id}/events", response_class=StreamingResponse, **openapi.EVENTS)
async def events(
    request: Request,
    job_id: KnownJob,
    services: HasServices,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Server-sent events from the first, or after `Last-Event-ID`, to the job's final state."""
    after = resume_point(last_event_id)
    if services.num_event_streams >= services.max_event_streams:
        raise Unavailable(f"{services.num_event_streams} event streams are open", cure="end some, or poll the job")
    stream = EventStream(
        services.jobs,
        job_id,
        after=after,
        closing=services.closing,
        keep_alive_s=services.keep_alive_s,
    )
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return CountedStream(stream, count=services.count_event_streams, headers=headers)


@jobs_api.get("/{job_id}/metrics", **openapi.answers("IterationList"))
def job_metrics(job_id: KnownJob, services: HasServices) -> Response:
    """Every trained iteration in numbers, oldest first."""
    return _json({"iterations": iteration_metrics(RunFolder(services.settings.run_root_path, job_id))})


@jobs_api.get("/{job_id}/streams", **openapi.answers("StreamReport"))
def streams(job_id: KnownJob, services: HasServices) -> Response:
    """The job's Redis streams: lengths, pending, ages, leases, rejections by reason, bytes."""
    return _json(stream_report(services.broker, job_id))


@jobs_api.get("/{job_id}/audit", **openapi.answers("AuditChain"))
def audit(job_id: KnownJob, services: HasServices) -> Response:
    """The audit chain, oldest first; each record with the digest that the next one names as `previous`."""
    records = services.jobs.audit(job_id)
    return _json({"records": [{**to_builtins(record), "digest": record_digest(record)} for record in records]})


@process_api.get("/healthz", **openapi.STATE)
async def healthz() -> Response:
    """The process answers."""
    return _json({"status": "ok"})


@process_api.get("/readyz", **openapi.STATE)
def readyz(services: HasServices) -> Response:
    """The broker answers; 503 says why not."""
    services.broker.ping()
    return _json({"status": "ready"})


@process_api.get("/metrics", response_class=Response, **openapi.METRICS)
def prometheus(services: HasServices) -> Response:
    """Prometheus text format: counts, and each active job's last iteration."""
    metrics = services.metrics
    metrics.active_jobs.set(len(services.jobs.active_jobs()))
    metrics.live_generators.set(len(Presence(services.broker).live()))
    return Response(metrics.exposition() + job_gauges(services), media_type=CONTENT_TYPE_LATEST)


def _create(services: Services, spec: JobSpec, key: str) -> tuple[JobStatus, bool]:
    """The job's status, and whether it is new. Raises Problem, InvalidInput, Conflict or Unavailable."""
    check_job(spec.dataset, spec.reward.components)
    submission.check_paths(spec, services.settings)
    submission.check_generators(spec, Presence(services.broker).live())
    check_plugins(spec, services.settings)
    job_id, is_new = services.jobs.create(spec, idempotency_key=key, max_jobs=services.settings.max_jobs)
    if is_new:
        services.metrics.jobs_created.inc()
        log.info("job %s (%s) is queued", job_id, spec.name)
    services.ensure_trainer(job_id)
    return job_status(services.broker, job_id), is_new


def _resume(services: Services, job_id: str, asked: ResumeRequest) -> JobStatus:
    """Raises NotFound, Conflict, InvalidInput or Unavailable."""
    services.jobs.resume(job_id, iterations=asked.iterations, on_unscorable=asked.on_unscorable)
    log.info("job %s is queued again", job_id)
    services.ensure_trainer(job_id)
    return job_status(services.broker, job_id)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK, *, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(value), status_code=status, media_type="application/json", headers=headers)
