"""Where the time goes, over HTTP: the timeline of a job's run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from contracts.encoding.json_lines import append_json_lines
from contracts.encoding.wire import encode_json
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from gateway import run_files
from gateway.app import create_app
from gateway.services import Services
from gateway.timeline.report import TimelineReport
from tests.builders import job_spec
from tests.served import asked
from tests.spans import one_iteration


def get(services: Services, path: str) -> httpx.Response:
    return asked(create_app(services), "GET", path, key=services.settings.api_key)


def job_with_spans(services: Services, num_iterations: int, **spec: Any) -> tuple[str, Path]:
    job_id, _ = services.jobs.create(job_spec(**spec))
    services.jobs.move(job_id, JobState.RUNNING)
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir(parents=True)
    for number in range(num_iterations):
        append_json_lines(folder.timeline, one_iteration(8.7 * number, number))
    return job_id, folder.timeline


def test_a_timeline_has_the_last_iterations_and_a_trace_of_them(services: Services) -> None:
    job_id, _ = job_with_spans(services, 5)
    answer = get(services, f"/v1/jobs/{job_id}/timeline?last=2")
    report = msgspec.json.decode(answer.content, type=TimelineReport)
    assert [one.iteration for one in report.iterations] == [3, 4]
    assert "idle" in report.words
    trace = get(services, f"/v1/jobs/{job_id}/timeline/perfetto?last=2")
    assert f"{job_id}.trace.json" in trace.headers["Content-Disposition"]
    assert len([one for one in trace.json()["traceEvents"] if one["ph"] == "X"]) == len(report.spans) + 2
    assert get(services, f"/v1/jobs/{job_id}/timeline?last=0").status_code == 422
    assert get(services, "/v1/jobs/job-other/timeline").status_code == 404


def test_a_job_without_an_iteration_says_so(services: Services) -> None:
    job_id, _ = services.jobs.create(job_spec())
    assert get(services, f"/v1/jobs/{job_id}/timeline").json()["words"] == "no iteration is done yet"


def test_a_long_timeline_is_read_from_its_end(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "FIRST_TAIL_BYTES", 1000)
    job_id, path = job_with_spans(services, 12)
    size = path.stat().st_size
    whole = get(services, f"/v1/jobs/{job_id}/timeline?last=3").json()
    path.write_bytes(b"{torn" * 4 + b"\n" + path.read_bytes())
    assert get(services, f"/v1/jobs/{job_id}/timeline?last=3").json() == whole
    assert len(encode_json(whole)) < size
