"""Whole jobs whose processes share no folder: their versions come from an object store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.fence import read_fence
from broker.monitor import job_status
from contracts.jobs import JobState
from contracts.settings import StackSettings
from contracts.weights import ObjectWeights
from onbeat.weights.objects.blobs import open_blobs
from onbeat.weights.objects.bucket import Bucket
from tests.chaos.short_job import LAG, assert_undisturbed, long_variant, sequential_digest, short_job, until
from tests.pipeline import Pipeline, wait_for_exit
from tests.rooms.objects.s3_server import BUCKET, FaultyProxy, S3Server, environment

ITERATIONS = 3
DELTAS = ObjectWeights(snapshot_every_versions=3)


class ApartPipeline(Pipeline):
    """Its generators have run roots and caches of their own."""

    @property
    def settings(self) -> StackSettings:
        return replace(super().settings, objects=f"s3://{BUCKET}/{self.folder.name}")

    def start_generators(self, count: int) -> None:
        for number in range(1, count + 1):
            self.start_apart(f"producer-{number}")

    def start_apart(self, name: str, **changes: str) -> None:
        folder = self.folder / "hosts" / name
        self.start(name, run_root=str(folder / "runs"), cache=str(folder / "cache"), **changes)


@pytest.fixture
def pipeline(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApartPipeline]:
    for name, value in environment(s3_server.port).items():
        monkeypatch.setenv(name, value)
    with ApartPipeline(tmp_path) as pipeline:
        yield pipeline


def bucket(pipeline: ApartPipeline) -> Bucket:
    return open_blobs(pipeline.settings, "any", "weights", deadline_s=120.0).bucket


def assert_nothing_is_left(pipeline: ApartPipeline, job_id: str) -> None:
    """Asserts that the job's versions are gone; the files of its run stay until it is deleted."""
    left = {key.removeprefix(f"{job_id}/").partition("/")[0] for key in bucket(pipeline).objects(job_id)}
    assert left == {"run", "pointers"}
    runs = [pipeline.folder / "runs", *pipeline.folder.glob("hosts/*/runs")]
    assert [path for folder in runs for path in folder.glob("**/weights")] == []


def test_a_killed_generator_and_a_killed_trainer_leave_the_weights_of_the_undisturbed_run(
    pipeline: ApartPipeline, tmp_path: Path
) -> None:
    spec = short_job(iterations=ITERATIONS, model__dtype="bfloat16", weights=DELTAS)
    pipeline.start_apart("producer-killed", crash_at="producer.loading_weights:2")
    job_id, _ = pipeline.jobs.create(spec)
    trainer = pipeline.start(f"consumer-{job_id}", job_id, crash_at=f"consumer.writing_weights:{ITERATIONS}")
    wait_for_exit(pipeline.children["producer-killed"])
    pipeline.start_generators(1)
    assert wait_for_exit(trainer) < 0
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, spec, tmp_path / "oracle"))
    assert_nothing_is_left(pipeline, job_id)


def test_a_bucket_that_may_not_be_written_fails_the_job_in_one_line_and_nothing_is_begun(
    pipeline: ApartPipeline, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultyProxy(s3_server.port) as proxy:
        proxy.refuse = lambda method, path: 403 if method == "PUT" else 0
        for name, value in environment(proxy.port).items():
            monkeypatch.setenv(name, value)
        job_id, _ = pipeline.jobs.create(short_job(weights=ObjectWeights()))
        assert wait_for_exit(pipeline.start(f"consumer-{job_id}", job_id)) == 2
        assert bucket(pipeline).objects(job_id) == {}
    status = job_status(pipeline.broker, job_id, generators=())
    assert status.state is JobState.FAILED
    assert (status.reason or "").startswith("ONBEAT_OBJECTS: the store refuses to take"), status.reason
    assert read_fence(pipeline.broker, pipeline.broker.job_keys(job_id)).state == ""


@long_variant
def test_a_store_that_hangs_in_the_middle_of_a_lagging_job_is_waited_for(
    pipeline: ApartPipeline, s3_server: S3Server, tmp_path: Path
) -> None:
    spec = short_job(iterations=2 * ITERATIONS, model__dtype="bfloat16", weights=DELTAS, **LAG)
    pipeline.start_generators(2)
    job_id, _ = pipeline.jobs.create(spec)
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    until(lambda: len(pipeline.jobs.audit(job_id)) >= 1, "the first commit")
    s3_server.pause()
    threading.Timer(3.0, s3_server.go_on).start()
    assert wait_for_exit(trainer) == 0
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, spec, tmp_path / "oracle"))
    assert_nothing_is_left(pipeline, job_id)
