"""What a reader asks: of a job its spec, scores, log, and whether its run holds; of the stack its state."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from broker.monitor import seen_generators, stack_state
from contracts.answers import AuditVerdict, LogPart, StackState
from contracts.jobs import EvaluationScore
from contracts.monitor import GeneratorSeen
from contracts.spec import JobSpec
from gateway import openapi
from gateway.run_files import evaluations, trainer_log
from gateway.services import HasServices, KnownJob
from gateway.verification import verify
from onbeat.http_service.bodies import CLIENT_GONE, json_answer

MAX_LOG_BYTES = 1024 * 1024
MAX_OFFSET = 2**53
"""Every number that JSON's readers hold exactly."""
GENERATORS = openapi.answers(openapi.list_of("GeneratorList", "generators", openapi.record(GeneratorSeen)))
SCORES = openapi.answers(openapi.list_of("EvaluationList", "evaluations", openapi.record(EvaluationScore)))
SPEC = openapi.answers(openapi.record(JobSpec), "As it was submitted, with what a resume has changed")
VERDICT = openapi.answers(openapi.record(AuditVerdict), "Whether the run holds, and each gap")

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


@router.post("/jobs/{job_id}/verify", **VERDICT)
async def verify_job(request: Request, job_id: KnownJob, services: HasServices) -> Response:
    """Check the audit chain again, and hash the weights that the gateway sees on disk; 503 while others are checked."""
    verdict = await verify(request, services, job_id)
    return Response(status_code=CLIENT_GONE) if verdict is None else json_answer(verdict)
