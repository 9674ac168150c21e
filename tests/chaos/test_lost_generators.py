"""A generator is killed while it holds a batch: the job's counters show it at the end, however the batch went on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from broker.monitor import job_status
from contracts.jobs import JobStatus, TrainerExit
from onbeat.base.process.child_process import ChildProcess
from tests.chaos.short_job import assert_undisturbed, committed, running, short_job, succeed, until
from tests.pipeline import Pipeline, wait_for_exit

NTH_CLAIM = 10
"""The first iteration has eight batches: by then it is committed, however many are claimed ahead."""

HELD = range(1, 5)
"""How many of the iteration's four batches the killed generator may have claimed: those whose steps it shared."""


def doomed(pipeline: Pipeline) -> ChildProcess:
    """A generator that is killed right after one of its claims."""
    return pipeline.start("producer-doomed", crash_at=f"producer.after_claim:{NTH_CLAIM}")


def assert_killed(generator: ChildProcess) -> None:
    assert wait_for_exit(generator) == -signal.SIGKILL, generator.tail()


def at_the_end(pipeline: Pipeline, job_id: str) -> JobStatus:
    """Its status once the leases of its last batches have ended."""
    until(lambda: status(pipeline, job_id).leases_lost > 0, "a lease that is lost")
    return status(pipeline, job_id)


def status(pipeline: Pipeline, job_id: str) -> JobStatus:
    return job_status(pipeline.broker, job_id)


def test_an_undisturbed_job_has_lost_no_lease(tmp_path: Path, undisturbed: str) -> None:
    with Pipeline(tmp_path) as pipeline:
        pipeline.start_generators(2)
        job_id = pipeline.train(short_job())
        assert_undisturbed(pipeline, job_id, undisturbed)
        assert (status(pipeline, job_id).leases_lost, status(pipeline, job_id).batches_reclaimed) == (0, 0)


def test_a_job_whose_other_generator_goes_on_shows_that_one_died(tmp_path: Path, undisturbed: str) -> None:
    """By a copy, or once the lease has run out."""
    with Pipeline(tmp_path) as pipeline:
        generator = doomed(pipeline)
        job_id, _ = pipeline.jobs.create(short_job())
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            until(committed(pipeline, job_id, 1), "an iteration")
            pipeline.start("producer-other")
            assert_killed(generator)
            succeed(trainer)
        assert_undisturbed(pipeline, job_id, undisturbed)
        assert at_the_end(pipeline, job_id).leases_lost in HELD


def test_a_job_that_rewound_before_another_took_the_batch_shows_it_too(tmp_path: Path, undisturbed: str) -> None:
    with Pipeline(tmp_path) as pipeline:
        generator = doomed(pipeline)
        job_id, _ = pipeline.jobs.create(short_job(trainer__checkpoint_every_iterations=100))
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            assert_killed(generator)
            trainer.kill()
        successor = succeeded(pipeline, job_id)
        pipeline.start("producer-other")
        succeed(successor)
        assert_undisturbed(pipeline, job_id, undisturbed)
        told = at_the_end(pipeline, job_id)
        assert told.leases_lost in HELD
        assert told.batches_reclaimed == 0


def succeeded(pipeline: Pipeline, job_id: str) -> ChildProcess:
    """Starts trainers until one has the job, and has rewound it."""
    while True:
        successor = pipeline.start(f"consumer-{job_id}-successor", job_id)
        while successor.is_running:
            if is_rewound(pipeline, job_id):
                return successor
            time.sleep(0.05)
        assert successor.exit_code == TrainerExit.HELD, successor.tail()


def is_rewound(pipeline: Pipeline, job_id: str) -> bool:
    return any(record.kind == "rewind" for record in pipeline.jobs.audit(job_id))
