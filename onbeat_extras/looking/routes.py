"""The endpoints of a job's dead batches: what they were, why they were given up, and another try."""

from __future__ import annotations

import logging
from typing import Annotated

from fastapi import APIRouter, Query, Response

from broker.monitor import job_status
from contracts.answers import DeadLetters
from contracts.jobs import JobStatus
from gateway import openapi
from gateway.services import HasServices, KnownJob
from onbeat.http_service.bodies import json_answer
from onbeat_extras.looking.dead_letters import DeadLetterBox

MAX_LISTED = 1000

log = logging.getLogger(__name__)
router = APIRouter(prefix="/v1/jobs/{job_id}/dead", tags=["jobs"])


@router.get("", **openapi.answers(openapi.record(DeadLetters)))
def dead_letters(
    job_id: KnownJob, services: HasServices, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100
) -> Response:
    """Show the job's newest dead batches, newest first, with their prompts where Redis still holds them."""
    return json_answer(DeadLetters(letters=DeadLetterBox(services.broker, job_id).newest(limit)))


@router.post("/{entry_id}/retry", **openapi.answers(openapi.record(JobStatus), "Its status now"))
def retry_dead_batch(entry_id: str, job_id: KnownJob, services: HasServices) -> Response:
    """Queue a job again that a dead batch ended: its open iteration is sampled anew, that batch with it.

    409, with the reason, where a retry can't bring the batch back: its iteration was committed without it, or is open.
    """
    DeadLetterBox(services.broker, job_id).retry(entry_id)
    log.info("job %s is queued again, for its dead batch %s", job_id, entry_id)
    return json_answer(job_status(services.broker, job_id))
