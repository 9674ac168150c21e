"""Generators and trainer take turns: the weights are those of `synchronous` with as many threads, and the other jobs of
the same generator keep theirs."""

from __future__ import annotations

from pathlib import Path

from contracts.encoding.wire import decode_json
from contracts.events import TimelineSpan
from contracts.run_folder import RunFolder
from contracts.timeline import is_of_the_pipeline
from tests.building.specs import trained_job
from tests.chaos.short_job import running, sequential_digest
from tests.pipeline import Pipeline

TURN_THREADS = 2


spec = trained_job.but(
    iterations=2,
    rollout__prompts_per_batch=8,
    trainer__checkpoint_every_iterations=1,
    evaluation__num_prompts=0,
)


def train(pipeline: Pipeline, schedule: str, **settings: int) -> str:
    """Returns the digest of the weights that the job ends with."""
    job_id = pipeline.train(spec(schedule=schedule), **settings)
    assert pipeline.verdict(job_id).gaps == ()
    return pipeline.final_digest(job_id)


def test_a_colocated_job_has_the_weights_of_synchronous_with_as_many_threads_and_leaves_other_jobs_theirs(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    with running(pipeline, "producer-wide", threads=TURN_THREADS):
        wide = train(pipeline, "synchronous", threads=TURN_THREADS)
    with running(pipeline, "producer-long-lived", threads=1, colocated_threads=TURN_THREADS):
        colocated = train(pipeline, "colocated", threads=1, colocated_threads=TURN_THREADS)
        after = train(pipeline, "periodic", threads=1)
    assert colocated == wide
    assert after == sequential_digest(pipeline, spec(schedule="periodic"), tmp_path)


def test_no_generator_samples_while_the_trainer_has_its_turn(pipeline: Pipeline) -> None:
    with running(pipeline, "producer-1", colocated_threads=1), running(pipeline, "producer-2", colocated_threads=1):
        job_id = pipeline.train(spec(schedule="colocated"))
    lines = RunFolder(pipeline.settings.run_root_path, job_id).timeline.read_bytes().splitlines()
    spans = [decode_json(line, TimelineSpan) for line in lines]
    for iteration in range(2):
        own = [span for span in spans if span.iteration == iteration and is_of_the_pipeline(span)]
        sampled_s = max(span.ended_s for span in own if span.what == "generate")
        assert sampled_s <= min(span.started_s for span in own if span.what in ("train", "step", "sync"))
        trained_s = max(span.ended_s for span in own if span.what != "open")
        following = [span.started_s for span in spans if span.iteration == iteration + 1 and span.what == "generate"]
        assert not following or trained_s <= min(following)
