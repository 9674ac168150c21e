"""A trainer's host is lost with its disk, again and again: another one goes on from what the object store has."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from gateway.app import create_app
from gateway.services import Services
from onbeat.audit.weights import digests_on_disk
from onbeat.run_folder.run_files import bring_files
from tests.chaos.short_job import LAG, assert_undisturbed, long_variant, sequential_digest, short_job
from tests.chaos.test_crash_points import COPY_POINTS, LAGGING_POINTS, TRAINER_POINTS
from tests.pipeline import Pipeline
from tests.task_worker import task_worker

FEW = ["consumer.after_micro_batch", *COPY_POINTS]
JOB = short_job(weights={"transport": "redis"}, evaluation__every_iterations=5, recording={})
LAGGING = short_job(iterations=30, weights={"transport": "redis"}, recording={}, **LAG)


@pytest.mark.parametrize(
    ("job", "points"),
    [(JOB, FEW), pytest.param(LAGGING, [*TRAINER_POINTS, *LAGGING_POINTS, *COPY_POINTS], marks=long_variant)],
    ids=["periodic", "delayed"],
)
def test_hosts_that_are_lost_with_their_disks_cost_what_came_after_the_last_checkpoint(
    tmp_path: Path, job: JobSpec, points: list[str]
) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    with Pipeline(tmp_path) as pipeline:
        oracle = sequential_digest(pipeline, job, tmp_path / "oracle")
        job_id, _ = pipeline.jobs.create(job)
        pipeline.start_generators(1)
        for point in points:
            host = tmp_path / point
            nth = 1 if point == "consumer.after_opening" else 2
            exit_code = pipeline.train_until_death(
                job_id, crash_at=f"{point}:{nth}", run_root=str(host), objects=bucket.as_uri()
            )
            assert exit_code == -signal.SIGKILL, f"{point} was never reached: exit code {exit_code}"
            shutil.rmtree(host)
        last = str(tmp_path / "last host")
        assert pipeline.train_until_death(job_id, run_root=last, objects=bucket.as_uri()) == 0
        settings = replace(pipeline.settings, objects=bucket.as_uri())
        folder = RunFolder(settings.run_root_path, job_id)
        bring_files(settings, folder, listed=pipeline.jobs.files(job_id), deadline_s=10.0)
        assert_undisturbed(pipeline, job_id, oracle)
        # Less than all of it was trained again each time.
        trained = [record.iteration for record in pipeline.jobs.audit(job_id) if record.kind == "commit"]
        assert trained.count(0) < len(points)
        _assert_seen(pipeline, replace(settings, run_root=str(tmp_path / "gateway's host")), job_id)


def _assert_seen(pipeline: Pipeline, settings: StackSettings, job_id: str) -> None:
    """Whether a gateway that shares no folder with any trainer shows the run, and verifies its weights."""
    services = Services(settings=settings, broker=pipeline.broker)
    headers = {"Authorization": f"Bearer {settings.api_key}"}
    with TestClient(create_app(services), base_url="http://localhost", headers=headers) as client:

        def ask(path: str, method: str = "GET") -> Any:
            answer = client.request(method, f"/v1/jobs/{job_id}/{path}")
            assert answer.is_success, answer.text
            return answer.json()

        iterations = ask("metrics")["iterations"]
        assert [one["iteration"] for one in iterations] == list(range(pipeline.jobs.spec(job_id).iterations))
        assert ask("timeline")["iterations"]
        assert ask("rollouts")["iterations"]
        # The worker of tasks has the gateway's disk, and brings what is missing there.
        with task_worker(settings, pipeline.broker, pipeline.folder / "logs" / "tasks.log", "check"):
            verdict = ask("verify?wait=300", "POST")
        assert verdict["verified"]
        assert verdict["digests_recomputed"] == len(digests_on_disk(RunFolder(settings.run_root_path, job_id)))
        assert verdict["digests_recomputed"] > 0
