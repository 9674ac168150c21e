"""What a person watches: all jobs, or one of them, as it changes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from broker.monitor import job_status, stream_report
from gateway import openapi
from gateway.event_stream import CountedStream
from gateway.job_list import newest_jobs
from gateway.live_stream import LiveStream, Look, SharedLook
from gateway.services import HasServices, KnownJob, Services

NUM_SHOWN = 100


router = APIRouter(prefix="/v1", tags=["live"])


@router.get(
    "/live",
    response_class=StreamingResponse,
    **openapi.event_stream("`jobs`: a JobList of the newest hundred, whenever it changed; `problem`: ProblemDetails"),
)
async def live(request: Request, services: HasServices) -> Response:
    """Send the newest jobs, at once and whenever one changed, looked at once a second."""
    return _stream(services, _shared(request, services), "the list of jobs")


@router.get(
    "/jobs/{job_id}/live",
    response_class=StreamingResponse,
    **openapi.event_stream(
        "`status`: a JobStatus, `streams`: a StreamReport, each when it changed; `problem`: ProblemDetails"
    ),
)
async def job_live(job_id: KnownJob, services: HasServices) -> Response:
    """Send the job's status and its streams, at once and whenever they changed, looked at once a second.

    The stream goes on after the job's end, because it may be resumed.
    """

    def look() -> dict[str, object]:
        return {"status": job_status(services.broker, job_id), "streams": stream_report(services.broker, job_id)}

    return _stream(services, look, job_id)


def _stream(services: Services, look: Look, what: str) -> Response:
    """Raises Unavailable where too many streams are open."""
    services.check_event_streams(cure="end some, or ask now and then")
    stream = LiveStream(
        records=look,
        what=what,
        closing=services.closing,
        period_s=services.live_period_s,
        keep_alive_s=services.keep_alive_s,
    )
    return CountedStream(stream, count=services.count_event_streams)


def _shared(request: Request, services: Services) -> Look:
    """The app's one look at the list; this runs in the event loop's thread alone."""
    state = request.app.state
    if not hasattr(state, "look_at_jobs"):
        state.look_at_jobs = SharedLook(
            lambda: {"jobs": {"jobs": newest_jobs(services.broker, limit=NUM_SHOWN)}}, period_s=services.live_period_s
        )
    return state.look_at_jobs
