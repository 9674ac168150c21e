"""A model's folder that is edited while its stack runs: real generators, of which one is killed and replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.presence import Presence
from contracts.spec.job import JobSpec
from gateway.named_files import with_file_digests
from tests.chaos.short_job import assert_undisturbed, committed, running, short_job, succeed, until
from tests.pipeline import REPOSITORY, Pipeline

MODEL = REPOSITORY / "configs" / "models" / "two-digit-addition"
NUM_GENERATORS = 1
ITERATIONS = 20
DIGIT = 21
"""The token of "1", which is in many answers: where it ends them, a job makes other weights."""


@pytest.fixture
def ends(pipeline: Pipeline) -> Iterator[Path]:
    """The file that says which tokens end a completion, in a copy of the model."""
    shutil.copytree(MODEL, pipeline.data / "model")
    yield pipeline.data / "model" / "generation_config.json"
    shutil.rmtree(pipeline.data)


def end_at_a_digit(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, DIGIT]}))


def accepted(pipeline: Pipeline, **changes: object) -> JobSpec:
    """The short job on the copy of the model, as a gateway accepts it now."""
    spec = short_job(**{"model__path": str(pipeline.data / "model"), "iterations": 4, **changes})
    return with_file_digests(spec, pipeline.settings)


def replace_generator(pipeline: Pipeline, edit: Callable[[], object] = lambda: None) -> None:
    """Stops the generator that runs, edits meanwhile, kills it, and starts another one."""
    (pid,) = [one.pid for name, one in pipeline.children.items() if name.startswith("producer") and one.is_running]
    os.kill(pid or 0, signal.SIGSTOP)
    edit()
    os.kill(pid or 0, signal.SIGKILL)
    until(lambda: not any(one.pid == pid and one.is_running for one in pipeline.children.values()), "its end")
    pipeline.start(f"producer-{len(pipeline.children)}")


def test_a_job_after_an_edit_has_the_same_weights_from_an_old_generator_and_from_a_new_one(
    pipeline: Pipeline, ends: Path
) -> None:
    before = pipeline.final_digest(pipeline.train(accepted(pipeline)))
    end_at_a_digit(ends)
    of_the_old = pipeline.final_digest(pipeline.train(accepted(pipeline)))
    replace_generator(pipeline)
    of_a_new = pipeline.final_digest(pipeline.train(accepted(pipeline)))
    assert of_the_old == of_a_new != before


def test_a_generator_that_starts_after_an_edit_leaves_the_job_alone_by_the_files_name_until_it_is_put_back(
    pipeline: Pipeline, ends: Path
) -> None:
    undisturbed = pipeline.final_digest(pipeline.train(accepted(pipeline, iterations=ITERATIONS)))
    as_it_was = ends.read_bytes()
    job_id, _ = pipeline.jobs.create(accepted(pipeline, iterations=ITERATIONS))
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        replace_generator(pipeline, partial(end_at_a_digit, ends))
        problem = f"model.path: {ends} has changed since the job was accepted"

        def is_left_alone() -> bool:
            live = Presence(pipeline.broker).live()
            return any(generator.leaves_alone.get(job_id, "").startswith(problem) for generator in live)

        until(is_left_alone, "the generator to leave the job alone")
        num_committed = len(pipeline.jobs.audit(job_id))
        assert num_committed < ITERATIONS
        ends.write_bytes(as_it_was)
        succeed(trainer)
    assert_undisturbed(pipeline, job_id, undisturbed)
    assert replace(pipeline.jobs.spec(job_id), name="") == replace(accepted(pipeline, iterations=ITERATIONS), name="")
