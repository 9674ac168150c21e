"""The routes of a reader: a job's events as they come, its numbers, chain and log; the stack's state."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Union, get_args

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from msgspec import Struct, to_builtins

from broker.fence import read_fence
from broker.monitor import stack_state
from broker.presence import Presence
from contracts.answers import JobStory, LogPart, SpecFiles, StackState, ToldEvent
from contracts.encoding.wire import MAX_ITERATIONS
from contracts.encoding.without_defaults import without_defaults
from contracts.events import AuditRecord, IterationCommitted, IterationMetrics, JobEvent, record_digest
from contracts.jobs import EvaluationScore
from contracts.monitor import GeneratorSeen
from contracts.spec.job import JobSpec
from gateway import openapi
from gateway.event_stream import CountedStream, EventStream, resume_point
from gateway.run_files import columns_of, evaluations, iteration_metrics, streamed, trainer_log
from gateway.services import HasCaller, HasServices, KnownJob
from gateway.spec_files import spec_files
from onbeat.base.http.bodies import json_answer

EVENTS_READ = 1000
DIGEST: dict[str, Any] = {"type": "object", "properties": {"digest": {"type": "string"}}}
LINK: dict[str, Any] = {"allOf": [openapi.record(AuditRecord), DIGEST]}
EVENTS = openapi.answers(openapi.EVENT, "Events to the job's final state", media_type="text/event-stream")
METRICS = openapi.answers(openapi.list_of("IterationList", "iterations", openapi.record(IterationMetrics)))
AUDIT = openapi.answers(openapi.list_of("AuditChain", "records", LINK))
Last = Annotated[int | None, Query(ge=1, le=2 * MAX_ITERATIONS)]
"""A chain has a record for each iteration and each rewind."""
MAX_LOG_BYTES = 1024 * 1024
MAX_OFFSET = 2**53
"""Every number that JSON's readers hold exactly."""
GENERATORS = openapi.answers(openapi.list_of("GeneratorList", "generators", openapi.record(GeneratorSeen)))
SCORES = openapi.answers(openapi.list_of("EvaluationList", "evaluations", openapi.record(EvaluationScore)))
SPEC = openapi.answers(openapi.record(JobSpec), "As it was submitted, with what a resume has changed")


class CommitOutline(Struct, tag_field="type", tag=IterationCommitted.__struct_config__.tag):
    """A commit of which nothing is read: there are thousands, whose numbers stand in `metrics.jsonl`."""


OUTLINED: Any = Union[CommitOutline, *(kind for kind in get_args(JobEvent) if kind is not IterationCommitted)]
router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/stack", **openapi.answers(openapi.record(StackState)))
def stack(services: HasServices) -> Response:
    """Show what all jobs share: Redis' memory, the live processes, how many jobs are kept."""
    return json_answer(stack_state(services.broker, max_jobs=services.settings.max_jobs))


@router.get("/files", **openapi.answers(openapi.record(SpecFiles)))
def files(services: HasServices) -> Response:
    """List the models and files of rows below the model root, and what is here of the hub, as a spec names them."""
    return json_answer(spec_files(services.settings.spec_root))


@router.get("/generators", **GENERATORS)
def generators(services: HasServices) -> Response:
    """List the live generators: the version that each holds, its tokens a second, what it is doing."""
    return json_answer({"generators": Presence(services.broker).live()})


@router.get("/jobs/{job_id}/spec", **SPEC)
def spec(job_id: KnownJob, services: HasServices, defaults: bool = True) -> Response:
    """Show the job's spec: a submission of it makes the same job again.

    With `defaults=false` keys that have their default are left out; otherwise every key stands there with its value.
    """
    job_spec = services.jobs.spec(job_id)
    return json_answer(job_spec if defaults else without_defaults(job_spec))


@router.get("/jobs/{job_id}/evaluations", **SCORES)
def held_out(job_id: KnownJob, services: HasServices) -> Response:
    """Show the mean rewards over the held-out prompts, oldest first."""
    return streamed("evaluations", evaluations(services.run_folder(job_id, below="evaluations.jsonl")))


@router.get("/jobs/{job_id}/log", **openapi.answers(openapi.record(LogPart)))
def log(
    job_id: KnownJob,
    services: HasServices,
    after: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LOG_BYTES)] = 65536,
) -> Response:
    """Show a part of the trainer's log: what stands behind its first `after` bytes. `next` asks for what follows."""
    folder = services.run_folder(job_id, below="trainer.log")
    return json_answer(trainer_log(folder, after=after, limit=limit))


@router.get("/jobs/{job_id}/events", response_class=StreamingResponse, **EVENTS)
async def events(
    job_id: KnownJob,
    services: HasServices,
    caller: HasCaller,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Send events from the first, or after `Last-Event-ID`, to the job's final state."""
    after = resume_point(last_event_id)
    stream = EventStream(
        jobs=services.jobs, job_id=job_id, after=after, closing=services.closing, keep_alive_s=services.keep_alive_s
    )
    return CountedStream(stream, count=partial(services.count_event_streams, caller=caller))


@router.get("/jobs/{job_id}/metrics", **METRICS)
def job_metrics(
    job_id: KnownJob, services: HasServices, last: Annotated[int | None, Query(ge=1, le=MAX_ITERATIONS)] = None
) -> Response:
    """Show every trained iteration in numbers, oldest first; or the last ones."""
    metrics = iteration_metrics(services.run_folder(job_id, below="metrics.jsonl"))
    return streamed("iterations", metrics, range(max(0, len(metrics) - last), len(metrics)) if last else None)


@router.get("/jobs/{job_id}/story", **openapi.answers(openapi.record(JobStory)))
def story(
    job_id: KnownJob,
    services: HasServices,
    after: Annotated[str, Query(max_length=64)] = "",
    iteration: Annotated[int, Query(ge=0, le=MAX_ITERATIONS)] = 0,
    most: Annotated[int | None, Query(ge=2, le=MAX_ITERATIONS)] = None,
) -> Response:
    """Show what is new: the events after one, and the numbers of the committed iterations from one on, by column.

    Where that is more than `most` iterations: each k-th alone, and the newest, at once. An answer has a bound in bytes:
    where there is more, it has the first iterations, and the next question goes on behind them.
    """
    keys = services.broker.job_keys(job_id)
    newest = resume_point(after, field="after")
    is_thinned = most is not None and read_fence(services.broker, keys).committed - iteration >= most
    told_events: list[ToldEvent] = []
    while not is_thinned and (rows := services.jobs.events_after(job_id, newest, count=EVENTS_READ, kind=OUTLINED)):
        newest = rows[-1][0]
        for event_id, event in rows:
            if not isinstance(event, CommitOutline):
                told_events.append(ToldEvent(id=event_id, event=event))
    committed = read_fence(services.broker, keys).committed  # after the events: a rewind that isn't told is in the rows
    records: Sequence[IterationMetrics] = []
    if iteration <= committed:  # else nothing is read, nor brought from another host
        lines = iteration_metrics(services.run_folder(job_id, below="metrics.jsonl"), first=iteration)
        places = [place for place, number in enumerate(lines.iterations) if number <= committed]
        chosen = lines.thinned(places, most) if most is not None and is_thinned else lines.fitting(places)
        records = list(lines.records(chosen))
    answer = JobStory(
        after=newest,
        events=tuple(told_events),
        iterations=tuple(metrics.iteration for metrics in records),
        columns=columns_of(records),
        thinned=is_thinned,
    )
    return json_answer(answer)


@router.get("/jobs/{job_id}/audit", **AUDIT)
def audit(job_id: KnownJob, services: HasServices, last: Last = None) -> Response:
    """Show the audit chain, oldest first, each record with the digest that the next one names as `previous`.

    With `last`, its newest records alone.
    """
    records = services.jobs.audit(job_id, last=last)
    return json_answer({"records": [{**to_builtins(record), "digest": record_digest(record)} for record in records]})
