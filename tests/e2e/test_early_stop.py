"""A job that its spec ends early ends at the same version however often its trainer dies, and one may train nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from broker.monitor import job_status
from contracts.encoding.json_lines import json_lines
from contracts.errors import Conflict
from contracts.jobs import EvaluationScore, JobState, ResumeRequest
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from tests.chaos.short_job import LAG, short_job
from tests.pipeline import Pipeline

EVERY = {"evaluation__every_iterations": 1, "evaluation__num_prompts": 32}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("early")) as pipeline:
        pipeline.start_generators(1)
        yield pipeline


def scores(pipeline: Pipeline, job_id: str) -> dict[int, float]:
    path = RunFolder(pipeline.settings.run_root_path, job_id).evaluations
    return {score.policy_version: score.sampled for _, score in json_lines(path, EvaluationScore)}


def without_a_better_one(of_versions: dict[int, float], *, patience: int) -> int:
    """The first version that is the last of so many which are no better than one before them."""
    return next(
        version
        for version in range(patience, len(of_versions))
        if max(of_versions[newer] for newer in range(version - patience + 1, version + 1))
        <= max(of_versions[older] for older in range(version - patience + 1))
    )


@pytest.mark.parametrize("changes", [{}, LAG], ids=["periodic", "delayed"])
def test_a_job_ends_at_the_same_version_however_often_its_trainer_dies(
    pipeline: Pipeline, changes: dict[str, Any]
) -> None:
    whole = pipeline.train(short_job(**EVERY, **changes))
    of_whole = scores(pipeline, whole)
    stops_at = without_a_better_one(of_whole, patience=2)
    assert stops_at < 8
    digests = {record.policy_version: record.weights_digest for record in pipeline.jobs.audit(whole)}

    stopping = short_job(**EVERY, **changes, evaluation__stop_when={"patience": 2})
    job_id, _ = pipeline.jobs.create(stopping)
    # Commits are counted from 1: the one of the iteration that ends the job, whose trainer dies before it says so.
    assert pipeline.train_until_death(job_id, crash_at=f"consumer.after_commit:{stops_at + 1}") == -signal.SIGKILL
    pipeline.train_to_the_end(job_id)

    status = job_status(pipeline.broker, job_id)
    assert status.state is JobState.SUCCEEDED
    assert status.reason.startswith("2 evaluations in a row were no better than that of version ")
    assert (status.iterations_committed, status.policy_version) == (stops_at, stops_at)
    assert status.weights_digest == digests[stops_at]
    newest = pipeline.jobs.audit(job_id)[-1]
    assert (newest.iteration, newest.next_weights_digest, newest.stopped) == (stops_at, "", status.reason)
    verdict = pipeline.verdict(job_id)
    assert (verdict.gaps, verdict.iterations) == ((), stops_at)
    assert RunFolder(pipeline.settings.run_root_path, job_id).checkpoint_after(stops_at - 1).is_dir()
    with pytest.raises(Conflict, match="has ended early"):
        pipeline.jobs.resume(job_id, ResumeRequest(iterations=20))


def job_without_training(**changes: Any) -> JobSpec:
    return short_job(iterations=0, evaluation__num_prompts=32, **changes)


def test_a_job_of_no_iterations_only_evaluates_its_model(pipeline: Pipeline) -> None:
    trained = pipeline.train(short_job(iterations=1, evaluation__num_prompts=32))
    job_id = pipeline.train(job_without_training())
    status = job_status(pipeline.broker, job_id)
    assert (status.state, status.iterations, status.iterations_committed) == (JobState.SUCCEEDED, 0, 0)
    assert scores(pipeline, job_id) == {0: scores(pipeline, trained)[0]}
    (record,) = pipeline.jobs.audit(job_id)
    assert record.next_weights_digest == ""
    assert {batch.split("/")[1] for batch in record.batches} == {"evaluation"}
    verdict = pipeline.verdict(job_id)
    assert (verdict.gaps, verdict.iterations, verdict.batches_trained) == ((), 0, 0)
    assert not RunFolder(pipeline.settings.run_root_path, job_id).checkpoints.exists()


def test_an_evaluation_whose_trainer_dies_is_done_by_the_next_one(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(job_without_training(timeouts__trainer_lease_s=1.0))
    assert pipeline.train_until_death(job_id, crash_at="consumer.after_commit:1") == -signal.SIGKILL
    pipeline.train_to_the_end(job_id)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.verdict(job_id).gaps == ()
