"""A trainer of several ranks ends with the weights of one rank, bit for bit, whichever of them dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from consumer.model.checkpoint import latest_checkpoint
from contracts.encoding.wire import decode_json
from contracts.events import TimelineSpan, versions_of
from contracts.jobs import JobState, TrainerExit
from contracts.run_folder import RunFolder
from tests.chaos.short_job import assert_undisturbed, committed, long_variant, short_job, until
from tests.pipeline import Pipeline, wait_for_exit

NUM_GENERATORS = 1


def process_of_rank(rank: int, job_id: str) -> int:
    """Its process number; 0 while there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes().split(b"\0")
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if job_id.encode() in command and f"RANK={rank}".encode() in environment:
            return int(path.name)
    return 0


def who_trained(pipeline: Pipeline, job_id: str) -> set[str]:
    lines = RunFolder(pipeline.settings.run_root_path, job_id).timeline.read_bytes().splitlines()
    spans = [decode_json(line, TimelineSpan) for line in lines]
    return {span.who for span in spans if span.what == "train"}


@long_variant
def test_four_ranks_share_the_batches_and_give_the_weights_of_one(pipeline: Pipeline, undisturbed: str) -> None:
    job_id = pipeline.train(short_job(trainer__world_size=4))
    assert_undisturbed(pipeline, job_id, undisturbed)
    assert len(who_trained(pipeline, job_id)) > 1


@pytest.mark.usefixtures("forked_ranks")
def test_ranks_that_share_the_model_give_the_same_weights_and_stop_and_resume_as_one(
    pipeline: Pipeline, undisturbed: str
) -> None:
    job_id, _ = pipeline.jobs.create(
        short_job(trainer__world_size=2, trainer__sharding="fsdp", trainer__checkpoint_every_iterations=100)
    )
    two_ranks = pipeline.start(f"consumer-{job_id}-two", job_id)
    until(committed(pipeline, job_id, 3), "three iterations")
    two_ranks.terminate()
    assert wait_for_exit(two_ranks) == TrainerExit.DONE, two_ranks.tail()
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    assert len(list(folder.checkpoints.glob("i*/model-*-of-00002.safetensors"))) == 2
    one_rank = pipeline.start(f"consumer-{job_id}-one", job_id, max_ranks=1)
    assert wait_for_exit(one_rank) == TrainerExit.DONE, one_rank.tail()
    assert pipeline.verdict(job_id).rewinds == 0
    assert_undisturbed(pipeline, job_id, undisturbed)


@long_variant
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_its_group_and_the_job_goes_on_to_the_same_weights(
    pipeline: Pipeline, undisturbed: str, rank: int
) -> None:
    job_id, _ = pipeline.jobs.create(short_job(trainer__world_size=2))
    first = pipeline.start(f"consumer-{job_id}-first", job_id)
    until(committed(pipeline, job_id, 1), "the first iteration")
    os.kill(process_of_rank(rank, job_id), signal.SIGKILL)
    assert wait_for_exit(first) == TrainerExit.DIED, first.tail()
    assert f"rank {rank} was killed by signal 9" in first.tail(50)
    assert not process_of_rank(0, job_id)
    assert not process_of_rank(1, job_id)
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, undisturbed)
    assert who_trained(pipeline, job_id) == {"trainer", "trainer 1"}, "its ranks share the batches"


@long_variant
def test_a_rank_that_hangs_ends_its_group_and_the_job_goes_on(pipeline: Pipeline, undisturbed: str) -> None:
    job_id, _ = pipeline.jobs.create(short_job(trainer__world_size=2, trainer__sharding="fsdp", timeouts__ranks_s=5.0))
    first = pipeline.start(f"consumer-{job_id}-first", job_id)
    until(committed(pipeline, job_id, 2), "two iterations")
    os.kill(process_of_rank(1, job_id), signal.SIGSTOP)
    assert wait_for_exit(first) == TrainerExit.DIED, first.tail()
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, undisturbed)


@long_variant
def test_sigterm_to_the_launcher_leaves_a_checkpoint_and_no_process(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(
        short_job(trainer__world_size=2, iterations=1000, trainer__checkpoint_every_iterations=1000)
    )
    first = pipeline.start(f"consumer-{job_id}", job_id)
    until(committed(pipeline, job_id, 2), "two iterations")
    first.terminate()
    assert wait_for_exit(first) == TrainerExit.DONE, first.tail()
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    checkpoint = latest_checkpoint(folder.checkpoints, job_id=job_id, versions=versions_of(pipeline.jobs.audit(job_id)))
    assert checkpoint is not None
    assert checkpoint.state.weights_digest == pipeline.jobs.audit(job_id)[-1].next_weights_digest
    assert not process_of_rank(0, job_id)
    assert not process_of_rank(1, job_id)
    assert pipeline.jobs.state(job_id) is JobState.RUNNING


@long_variant
def test_a_job_whose_ranks_cannot_load_its_model_fails_with_the_reason(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(short_job(trainer__world_size=2, model__path="no/such/model"))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    assert wait_for_exit(trainer) == TrainerExit.FAILED, trainer.tail()
    assert "Traceback" not in trainer.tail()
    assert pipeline.jobs.fields(job_id)["reason"].decode().startswith("model.path: no folder")


def rank_processes(job_id: str) -> list[int]:
    return [pid for rank in (0, 1) if (pid := process_of_rank(rank, job_id))]


@pytest.fixture
def endless_data(pipeline: Pipeline) -> Iterator[str]:
    """A data set that never arrives: rank 0 waits for it with the lease held, the other for rank 0."""
    path = pipeline.data / "endless.jsonl"
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    yield str(path)
    path.unlink()


@pytest.mark.parametrize("sharding", [pytest.param("none", marks=long_variant), "fsdp"])
@pytest.mark.parametrize(
    "end", [pytest.param("a cancel", marks=long_variant), pytest.param("a stop", marks=long_variant), "a kill"]
)
def test_ranks_that_load_end_at_once_and_leave_no_process(
    pipeline: Pipeline, endless_data: str, sharding: str, end: str
) -> None:
    job_id, _ = pipeline.jobs.create(
        short_job(
            trainer__world_size=2,
            trainer__sharding=sharding,
            dataset={"type": "jsonl", "train_path": endless_data},
            evaluation__num_prompts=0,
        )
    )
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    until(lambda: pipeline.jobs.state(job_id) is JobState.RUNNING, "a trainer that loads")
    until(lambda: len(rank_processes(job_id)) == 2, "its ranks")
    if end == "a cancel":
        pipeline.jobs.request_cancel(job_id)
        assert wait_for_exit(trainer) == TrainerExit.STOPPED, trainer.tail(50)
        assert pipeline.jobs.state(job_id) is JobState.CANCELLED
    elif end == "a stop":
        trainer.terminate()
        assert wait_for_exit(trainer) == TrainerExit.DONE, trainer.tail(50)
        assert pipeline.jobs.state(job_id) is JobState.RUNNING
    else:
        os.kill(trainer.pid or 0, signal.SIGKILL)
        wait_for_exit(trainer)
    until(lambda: not rank_processes(job_id), "the ranks' end")
