"""The endpoints of a job's dead batches (what they were, why, another try), and of the whole stack."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Response

from broker.monitor import job_status
from contracts.dead_letters import DeadLetters
from contracts.jobs import JobStatus
from gateway import openapi
from gateway.services import HasServices, KnownJob, OwnJob
from gateway.views.dead_letters import DeadLetterBox
from gateway.views.stack_report import StackReport, stack_report
from onbeat.base.http.bodies import json_answer

MAX_LISTED = 1000

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/jobs/{job_id}/dead", **openapi.answers(openapi.record(DeadLetters)))
def dead_letters(
    job_id: KnownJob, services: HasServices, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100
) -> Response:
    """Show the job's newest dead batches, newest first, with their prompts where Redis still holds them."""
    return json_answer(DeadLetters(letters=DeadLetterBox(services.broker, job_id).newest(limit)))


@router.post("/jobs/{job_id}/dead/{entry_id}/retry", **openapi.answers(openapi.record(JobStatus), "Its status now"))
def retry_dead_batch(entry_id: str, job_id: OwnJob, services: HasServices) -> Response:
    """Queue a job again that a dead batch ended: its open iteration is sampled anew, that batch with it.

    409, with the reason, where a retry can't bring the batch back: its iteration was committed without it, or is open.
    """
    DeadLetterBox(services.broker, job_id).retry(entry_id)
    log.info("job %s is queued again, for its dead batch %s", job_id, entry_id)
    return json_answer(job_status(services.broker, job_id))


@router.get("/stack/report", **openapi.answers(openapi.record(StackReport)))
def whole_stack(services: HasServices) -> Response:
    """Show the stack on one screen: Redis, the disk, and the trainers, generators and workers that live."""
    return json_answer(stack_report(services))
