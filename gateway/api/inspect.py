"""What a reader asks: of a job its spec, scores and log; of the stack its state."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from broker.monitor import seen_generators, stack_state
from contracts.answers import LogPart, StackState
from contracts.jobs import EvaluationScore
from contracts.monitor import GeneratorSeen
from contracts.spec import JobSpec
from gateway import openapi
from gateway.run_files import evaluations, trainer_log
from gateway.services import HasServices, KnownJob
from onbeat.http_service.bodies import json_answer

MAX_LOG_BYTES = 1024 * 1024
MAX_OFFSET = 2**53
"""Every number that JSON's readers hold exactly."""
GENERATORS = openapi.answers(openapi.list_of("GeneratorList", "generators", openapi.record(GeneratorSeen)))
SCORES = openapi.answers(openapi.list_of("EvaluationList", "evaluations", openapi.record(EvaluationScore)))
SPEC = openapi.answers(openapi.record(JobSpec), "As it was submitted, with what a resume has changed")

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/stack", **openapi.answers(openapi.record(StackState)))
def stack(services: HasServices) -> Response:
    """Show what all jobs share: Redis' memory, the live processes, how many jobs are kept."""
    return json_answer(stack_state(services.broker, max_jobs=services.settings.max_jobs))


@router.get("/generators", **GENERATORS)
def generators(services: HasServices) -> Response:
    """List the live generators: the version that each holds, its tokens a second, what it is doing."""
    return json_answer({"generators": seen_generators(services.broker)})


@router.get("/jobs/{job_id}/spec", **SPEC)
def spec(job_id: KnownJob, services: HasServices) -> Response:
    """Show the job's spec, every key with its value: a submission of it makes the same job again."""
    return json_answer(services.jobs.spec(job_id))


@router.get("/jobs/{job_id}/evaluations", **SCORES)
def held_out(job_id: KnownJob, services: HasServices) -> Response:
    """Show the mean rewards over the held-out prompts, oldest first."""
    return json_answer({"evaluations": evaluations(services.run_folder(job_id, below="evaluations.jsonl"))})


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
