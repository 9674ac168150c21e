"""The endpoints of where the time goes: the timeline of a job's last iterations, and the same as a trace."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from contracts.events import TimelineSpan
from gateway import openapi
from gateway.run_files import end_of
from gateway.services import HasServices, KnownJob, Services
from gateway.timeline.perfetto import perfetto_trace
from gateway.timeline.report import TimelineReport, timeline_report
from onbeat.base.http.bodies import json_answer

MAX_SHOWN = 100
"""Iterations of one answer."""
LONGEST_TAIL_BYTES = 4 * 1024 * 1024
"""Most bytes of a timeline that are read, however many iterations are asked for: 30,000 spans. As records, as a report
and as an answer they take ten times as much memory."""
Shown = Annotated[int, Query(ge=1, le=MAX_SHOWN)]
TRACE: dict[str, Any] = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {"traceEvents": {"type": "array", "items": {"type": "object"}}},
}

router = APIRouter(prefix="/v1", tags=["jobs"])


@router.get("/jobs/{job_id}/timeline", **openapi.answers(openapi.record(TimelineReport)))
def timeline(job_id: KnownJob, services: HasServices, last: Shown = 3) -> Response:
    """Show who did what in the last iterations, how long each was idle, and what the iterations waited for."""
    return json_answer(_report(services, job_id, last))


@router.get("/jobs/{job_id}/timeline/perfetto", **openapi.answers(TRACE, "A trace in the Chrome trace event format"))
def perfetto(job_id: KnownJob, services: HasServices, last: Shown = 20) -> Response:
    """Export the last iterations as a trace, which ui.perfetto.dev opens."""
    name = f'attachment; filename="{job_id}.trace.json"'
    return json_answer(perfetto_trace(_report(services, job_id, last)), headers={"Content-Disposition": name})


def _report(services: Services, job_id: str, last: int) -> TimelineReport:
    """Raises Unavailable where the run folder can't be read."""
    is_final = services.jobs.state(job_id).is_final
    ahead = 0 if is_final else services.jobs.spec(job_id).max_policy_lag
    # The first iteration that is found may have its first lines before what was read.
    spans = end_of(
        services.run_folder(job_id, below="timeline.jsonl").timeline,
        TimelineSpan,
        lambda read_spans, size: (
            size >= LONGEST_TAIL_BYTES or len({span.iteration for span in read_spans}) > last + ahead
        ),
    )
    return timeline_report(job_id, spans, last=last, left_out=ahead)
