"""What a job tells: its events as they come, its numbers, its streams, its audit chain."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import to_builtins

from broker.monitor import stream_report
from contracts.encoding.wire import MAX_ITERATIONS
from contracts.events import AuditRecord, IterationMetrics, record_digest
from contracts.monitor import StreamReport
from gateway import openapi
from gateway.event_stream import CountedStream, EventStream, resume_point
from gateway.run_files import iteration_metrics
from gateway.services import HasServices, KnownJob
from onbeat.http_service.bodies import json_answer

DIGEST: dict[str, Any] = {"type": "object", "properties": {"digest": {"type": "string"}}}
LINK: dict[str, Any] = {"allOf": [openapi.record(AuditRecord), DIGEST]}
METRICS = openapi.answers(openapi.list_of("IterationList", "iterations", openapi.record(IterationMetrics)))
AUDIT = openapi.answers(openapi.list_of("AuditChain", "records", LINK))
Last = Annotated[int | None, Query(ge=1, le=2 * MAX_ITERATIONS)]
"""A chain has a record for each iteration and each rewind."""

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])


@router.get("/events", response_class=StreamingResponse, **openapi.event_stream("Events to the job's final state"))
async def events(
    request: Request,
    job_id: KnownJob,
    services: HasServices,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Send events from the first, or after `Last-Event-ID`, to the job's final state."""
    after = resume_point(last_event_id)
    services.check_event_streams(cure="end some, or poll the job")
    stream = EventStream(
        what=f"the events of {job_id}",
        jobs=services.jobs,
        job_id=job_id,
        after=after,
        closing=services.closing,
        keep_alive_s=services.keep_alive_s,
    )
    return CountedStream(stream, count=services.count_event_streams)


@router.get("/metrics", **METRICS)
def job_metrics(
    job_id: KnownJob, services: HasServices, last: Annotated[int | None, Query(ge=1, le=MAX_ITERATIONS)] = None
) -> Response:
    """Show every trained iteration in numbers, oldest first; or the last ones."""
    found = iteration_metrics(services.run_folder(job_id, below="metrics.jsonl"))
    return json_answer({"iterations": found[-last:] if last else found})


@router.get("/streams", **openapi.answers(openapi.record(StreamReport)))
def streams(job_id: KnownJob, services: HasServices) -> Response:
    """Show the job's Redis streams: lengths, pending, ages, leases, rejections by reason, bytes."""
    return json_answer(stream_report(services.broker, job_id))


@router.get("/audit", **AUDIT)
def audit(job_id: KnownJob, services: HasServices, last: Last = None) -> Response:
    """Show the audit chain, oldest first, each record with the digest that the next one names as `previous`.

    With `last`, its newest records alone.
    """
    records = services.jobs.audit(job_id, last=last)
    return json_answer({"records": [{**to_builtins(record), "digest": record_digest(record)} for record in records]})
