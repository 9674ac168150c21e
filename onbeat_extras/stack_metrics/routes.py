"""The endpoint of one moment of a job's streams."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway import openapi
from gateway.services import HasServices, KnownJob
from onbeat.http_service.bodies import json_answer
from onbeat_extras.stack_metrics.stream_report import StreamReport, stream_report

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/jobs/{job_id}/streams", **openapi.answers(openapi.record(StreamReport)))
def streams(job_id: KnownJob, services: HasServices) -> Response:
    """Show the job's Redis streams: lengths, pending, ages, leases, rejections by reason, bytes."""
    return json_answer(stream_report(services.broker, job_id))
