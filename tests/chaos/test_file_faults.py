"""Files that go bad: weights that were damaged on their way, and a disk without room for a checkpoint."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.monitor import job_status
from consumer.model.checkpoint import MODEL_FILE, OPTIMIZER_FILE, latest_checkpoint, read_checkpoint
from contracts.events import versions_of
from contracts.jobs import JobState, TrainerExit
from contracts.run_folder import RunFolder
from tests.builders import flip_a_bit
from tests.chaos.short_job import (
    DEADLINE_S,
    LAG,
    assert_undisturbed,
    committed,
    long_variant,
    running,
    sequential_digest,
    short_job,
    succeed,
    until,
)
from tests.pipeline import Pipeline, wait_for_exit

NUM_GENERATORS = 1

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prlimit")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip_a_bit, pytest.param(cut, marks=long_variant)])
def test_damaged_weights_are_refused_and_written_again(
    pipeline: Pipeline, undisturbed: str, damage: Callable[[Path], None]
) -> None:
    generator = pipeline.children["producer-1"].pid or 0
    job_id, _ = pipeline.jobs.create(short_job(rollout__max_attempts=3))
    os.kill(generator, signal.SIGSTOP)
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(lambda: job_status(pipeline.broker, job_id).batches_expected > 0, "the first iteration")
        (path,) = RunFolder(pipeline.settings.run_root_path, job_id).weights_of(0).iterdir()
        damage(path)
        os.kill(generator, signal.SIGCONT)
        succeed(trainer)
        assert "a generator refuses" in trainer.tail(num_lines=100)
    assert "; again in" in pipeline.children["producer-1"].tail(num_lines=100)
    assert_undisturbed(pipeline, job_id, undisturbed)


def test_a_version_that_the_policy_has_moved_on_from_is_repaired_by_the_next_trainer(
    tmp_path: Path,
) -> None:
    """Version 2 samples iteration 3, which trains version 3: no memory holds 2 any more, and checkpoint 1 is of it."""
    # Without an evaluation, whose batches may be taken before or after those of the next iteration, the fifteenth
    # batch to be scored is the third of iteration 3: where the process dies there, two of it are published at most.
    job = short_job(evaluation__num_prompts=0, **LAG | {"max_policy_lag": 1})
    with Pipeline(tmp_path) as pipeline:
        digest = sequential_digest(pipeline, job, tmp_path / "oracle")
        first = pipeline.start("producer-first", crash_at=f"producer.after_scoring:{3 * 4 + 3}")
        job_id, _ = pipeline.jobs.create(job)
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            wait_for_exit(first, DEADLINE_S)
            until(committed(pipeline, job_id, 3), "version 3")
            (path,) = RunFolder(pipeline.settings.run_root_path, job_id).weights_of(2).iterdir()
            flip_a_bit(path)
            pipeline.start_generators(1)
            assert wait_for_exit(trainer, DEADLINE_S) == TrainerExit.DIED
            assert "the trainer that starts next publishes it again" in trainer.tail()
        pipeline.train_to_the_end(job_id)
        assert_undisturbed(pipeline, job_id, digest)


@linux_only
def test_a_disk_without_room_fails_the_job_by_name_and_with_room_it_goes_on_from_the_checkpoint_before(
    pipeline: Pipeline, undisturbed: str
) -> None:
    job_id, _ = pipeline.jobs.create(short_job(timeouts__trainer_lease_s=60.0))
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    first = folder.checkpoint_after(1)
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(first.exists, "the first checkpoint")
        # Room for a version of the weights, not for the optimizer's state: writes beyond it fail, as on a full disk.
        room = (first / OPTIMIZER_FILE).stat().st_size - 1
        assert (first / MODEL_FILE).stat().st_size < room
        resource.prlimit(trainer.pid or 0, resource.RLIMIT_FSIZE, (room, room))
        assert wait_for_exit(trainer, DEADLINE_S) == 2
    status = job_status(pipeline.broker, job_id)
    assert status.state is JobState.FAILED
    found = latest_checkpoint(folder.checkpoints, job_id=job_id, versions=versions_of(pipeline.jobs.audit(job_id)))
    assert found is not None
    failed = folder.checkpoint_after(found.state.iteration + 2)
    assert status.reason.startswith(f"{failed}: cannot write: ")
    assert "free space there" in status.reason
    assert [path for path in folder.checkpoints.iterdir() if path.name.startswith(".")] == []
    assert read_checkpoint(found.folder).state == found.state
    pipeline.jobs.resume(job_id)
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, undisturbed)
