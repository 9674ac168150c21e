"""Resampled prompts keep the promise of test_same_weights.py (I7), by any generator and after any death."""

from __future__ import annotations

import signal

import pytest

from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics, TimelineSpan
from contracts.run_folder import RunFolder
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, running, short_job, undisturbed_digest
from tests.pipeline import Pipeline, wait_for_exit

ITERATIONS = 4
JOB = short_job(
    iterations=ITERATIONS,
    algorithm={"loss": "dapo", "entropy_coefficient": 1e-3},
    rollout__prompts_per_batch=8,
    rollout__max_resamples=3,
    reward__components=[{"type": "exact"}, {"type": "overlong", "max_tokens": 6, "buffer_tokens": 2}],
)


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """Final digest of the undisturbed synchronous run with one generator."""
    with running(pipeline, "producer-oracle"):
        return undisturbed_digest(pipeline, JOB)


def test_a_generator_killed_between_two_rounds_and_a_killed_trainer_leave_the_weights_as_they_were(
    pipeline: Pipeline, oracle: str
) -> None:
    """The killed generator is replaced by two."""
    job_id, _ = pipeline.jobs.create(JOB)
    doomed = pipeline.start(f"consumer-{job_id}", job_id, crash_at="consumer.after_step:3")
    first = pipeline.start("producer-first", crash_at="producer.after_scoring:2")
    assert wait_for_exit(first, DEADLINE_S) == -signal.SIGKILL
    with running(pipeline, "producer-second"), running(pipeline, "producer-third"):
        assert wait_for_exit(doomed, DEADLINE_S) == -signal.SIGKILL
        pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, oracle)
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    metrics = [decode_json(line, IterationMetrics) for line in folder.metrics.read_bytes().splitlines()]
    spans = [decode_json(line, TimelineSpan) for line in folder.timeline.read_bytes().splitlines()]
    assert {one.iteration for one in metrics} == set(range(ITERATIONS))
    assert all(one.num_resamples > one.zero_advantage_share * 32 for one in metrics)
    assert len([one for one in spans if one.what == "score" and "train" in one.batch_id]) > 4 * ITERATIONS
