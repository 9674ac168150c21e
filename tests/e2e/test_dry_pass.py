"""A trainer whose machine has no room for the job's largest micro-batch says so once, with a number that has room."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from broker.monitor import job_status
from contracts.events import MemoryMeasured, TrainerStarted
from contracts.jobs import JobState, TrainerExit
from contracts.spec.job import JobSpec
from tests import forked
from tests.chaos.short_job import short_job
from tests.pipeline import Pipeline, wait_for_exit

ADDRESS_KIB = 2_600_000
"""What torch and the model take, and some thousand tokens' activations."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("dry")) as pipeline:
        pipeline.start_generators(1)
        yield pipeline


def large_job(pass_tokens: int) -> JobSpec:
    """1,024 completions of up to 192 tokens, as many in a pass as is said; the model ends its own much earlier."""
    return short_job(
        iterations=1,
        evaluation__num_prompts=0,
        rollout__batches_per_iteration=1,
        rollout__prompts_per_batch=64,
        rollout__group_size=16,
        rollout__sampling={"max_new_tokens": 192},
        trainer={"packing": "padded", "max_tokens_per_micro_batch": pass_tokens},
    )


def measured(pipeline: Pipeline, job_id: str) -> list[MemoryMeasured]:
    events = [event for _, event in pipeline.jobs.events_after(job_id, "0")]
    return [event for event in events if isinstance(event, MemoryMeasured)]


def test_a_job_without_room_ends_once_and_with_the_number_it_names_it_trains(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forked.ADDRESS_KIB, str(ADDRESS_KIB))
    job_id, _ = pipeline.jobs.create(large_job(pass_tokens=131_072))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    assert wait_for_exit(trainer) == TrainerExit.FAILED
    status = job_status(pipeline.broker, job_id)
    assert status.state is JobState.FAILED
    assert status.reason.startswith("trainer.max_tokens_per_micro_batch: out of memory in the dry pass, of 131072 ")
    number = re.search(r"set trainer\.max_tokens_per_micro_batch = (\d+), which has room here", status.reason)
    assert number is not None, status.reason
    assert measured(pipeline, job_id) == []
    starts = [event for _, event in pipeline.jobs.events_after(job_id, "0") if isinstance(event, TrainerStarted)]
    assert len(starts) == 1

    job_id, _ = pipeline.jobs.create(large_job(pass_tokens=int(number[1])))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    assert wait_for_exit(trainer) == TrainerExit.DONE, trainer.tail()
    assert job_status(pipeline.broker, job_id).state is JobState.SUCCEEDED
    (event,) = measured(pipeline, job_id)
    assert event.usable_bytes == ADDRESS_KIB * 1024
    assert 0 < event.peak_bytes < event.usable_bytes
    assert 0.8 * int(number[1]) < event.num_tokens <= int(number[1])
