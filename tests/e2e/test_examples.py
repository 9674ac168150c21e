"""The programs of examples/, each doing a real job to its end beside our own processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker.connection.roles import GENERATOR, STAGE, TRAINER
from broker.monitor import job_status
from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import convert
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from process.child_process import ChildProcess
from process.waiting import Waiting
from tests.pipeline import REPOSITORY, Pipeline, wait_for_exit

EXAMPLES = REPOSITORY / "examples"
LONGEST = {"trainer.py": 60, "generator.py": 40, "stage.py": 30}
VARIETY = {
    "type": "external",
    "name": "variety",
    "inputs": ["text"],
    "outputs": [{"name": "variety", "type": "float32"}],
    "reward_column": "variety",
    "weight": 0.1,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("examples")) as started:
        yield started


def spec_with(*, prompts: int, **tables: Any) -> JobSpec:
    """prompts: of an iteration."""
    values = {
        "name": "an example",
        "iterations": 4,
        "deterministic": False,
        "model": {"path": "configs/models/two-digit-addition"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {
            "batches_per_iteration": 2,
            "prompts_per_batch": prompts // 2,
            "group_size": 8,
            "max_prompt_tokens": 8,
            "sampling": {"max_new_tokens": 5},
        },
        "evaluation": {"num_prompts": 3 * prompts, "prompts_per_batch": 3 * prompts},
    }
    return convert(values | tables, JobSpec)


def until_committed(pipeline: Pipeline, job_id: str, child: ChildProcess, *, number: int) -> None:
    waiting = Waiting(f"{number} commits", deadline_s=240.0)
    while len(pipeline.jobs.audit(job_id)) < number:
        assert child.exit_code is None, child.tail()
        waiting.poke()
        child.wait(0.1)


def done(child: ChildProcess) -> None:
    assert wait_for_exit(child) == 0, child.tail()


def test_the_examples_are_as_short_as_they_are_said_to_be() -> None:
    for name, longest in LONGEST.items():
        assert len((EXAMPLES / name).read_text().splitlines()) <= longest


def test_a_trainer_in_plain_pytorch_learns_is_killed_and_goes_on_and_its_job_is_verified(pipeline: Pipeline) -> None:
    job_id, _ = pipeline.jobs.create(spec_with(prompts=64, iterations=10, trainer={"external": True}))
    generator = pipeline.start("producer-ours")
    first = pipeline.start_program("trainer-1", EXAMPLES / "trainer.py", job_id, role=TRAINER)
    until_committed(pipeline, job_id, first, number=2)
    first.kill()
    done(pipeline.start_program("trainer-2", EXAMPLES / "trainer.py", job_id, role=TRAINER))
    generator.stop(grace_s=5.0)

    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    verdict = pipeline.verdict(job_id)
    assert not verdict.gaps
    assert (verdict.num_iterations, verdict.num_trained_batches) == (10, 20)
    lines = read_json_lines(RunFolder(pipeline.settings.run_root_path, job_id).metrics, IterationMetrics)
    assert {line.iteration for line in lines} == set(range(10))
    assert all(line.grad_norm > 0.0 for line in lines)
    status = job_status(pipeline.broker, job_id)
    assert status.evaluation_before is not None
    assert status.evaluation_latest is not None
    assert (status.evaluation_latest.greedy or 0.0) > (status.evaluation_before.greedy or 1.0), "it learns"


def test_a_generator_and_a_stage_of_ones_own_serve_our_trainer(pipeline: Pipeline) -> None:
    spec = spec_with(prompts=4, iterations=2, stages=[VARIETY], optimizer={"learning_rate": 1e-4})
    job_id, _ = pipeline.jobs.create(spec)
    generator = pipeline.start_program("generator", EXAMPLES / "generator.py", job_id, role=GENERATOR)
    stage = pipeline.start_program("stage", EXAMPLES / "stage.py", job_id, role=STAGE)
    pipeline.train_to_the_end(job_id)
    done(generator)
    done(stage)

    verdict = pipeline.verdict(job_id)
    assert not verdict.gaps
    assert verdict.num_trained_batches == 4
