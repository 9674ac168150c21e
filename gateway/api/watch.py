"""What a job tells: its events as they come, its numbers, its streams, its audit chain."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec import to_builtins

from broker.fence import read_fence
from broker.monitor import stream_report
from contracts.answers import JobStory, ToldEvent
from contracts.encoding.wire import MAX_ITERATIONS
from contracts.events import AuditRecord, IterationCommitted, IterationMetrics, record_digest
from contracts.monitor import StreamReport
from gateway import openapi
from gateway.event_stream import CountedStream, EventStream, resume_point
from gateway.run_files import columns_of, iteration_metrics
from gateway.services import HasServices, KnownJob
from onbeat.http_service.bodies import json_answer

EVENTS_READ = 1000
DIGEST: dict[str, Any] = {"type": "object", "properties": {"digest": {"type": "string"}}}
LINK: dict[str, Any] = {"allOf": [openapi.record(AuditRecord), DIGEST]}
METRICS = openapi.answers(openapi.list_of("IterationList", "iterations", openapi.record(IterationMetrics)))
AUDIT = openapi.answers(openapi.list_of("AuditChain", "records", LINK))
Last = Annotated[int | None, Query(ge=1, le=2 * MAX_ITERATIONS)]
"""A chain has a record for each iteration and each rewind."""

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"])


@router.get("/events", response_class=StreamingResponse, **openapi.event_stream("Events to the job's final state"))
async def events(
    request: Request, job_id: KnownJob, services: HasServices, last_event_id: Annotated[str | None, Header()] = None
) -> Response:
    """Send events from the first, or after `Last-Event-ID`, to the job's final state."""
    after = resume_point(last_event_id)
    services.check_event_streams(cure="end some, or poll the job")
    stream = EventStream(
        jobs=services.jobs, job_id=job_id, after=after, closing=services.closing, keep_alive_s=services.keep_alive_s
    )
    return CountedStream(stream, count=services.count_event_streams)


@router.get("/metrics", **METRICS)
def job_metrics(
    job_id: KnownJob, services: HasServices, last: Annotated[int | None, Query(ge=1, le=MAX_ITERATIONS)] = None
) -> Response:
    """Show every trained iteration in numbers, oldest first; or the last ones."""
    found = iteration_metrics(services.run_folder(job_id, below="metrics.jsonl"))
    return json_answer({"iterations": found[-last:] if last else found})


@router.get("/story", **openapi.answers(openapi.record(JobStory)))
def story(
    job_id: KnownJob,
    services: HasServices,
    after: Annotated[str, Query(max_length=64)] = "",
    iteration: Annotated[int, Query(ge=0, le=MAX_ITERATIONS)] = 0,
) -> Response:
    """Show what is new: the events after one, and the numbers of the committed iterations from one on, by column."""
    told, newest = [], resume_point(after, field="after")
    while rows := services.jobs.events_after(job_id, newest, count=EVENTS_READ):
        newest = rows[-1][0]
        told += [ToldEvent(id=one, event=event) for one, event in rows if not isinstance(event, IterationCommitted)]
    committed = read_fence(services.broker, services.broker.job_keys(job_id)).committed
    found: list[IterationMetrics] = []
    if iteration <= committed:  # else nothing is read, nor brought from another host
        lines = iteration_metrics(services.run_folder(job_id, below="metrics.jsonl"), first=iteration)
        found = [metrics for metrics in lines if metrics.iteration <= committed]
    numbers = tuple(metrics.iteration for metrics in found)
    return json_answer(JobStory(after=newest, events=tuple(told), iterations=numbers, columns=columns_of(found)))


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
