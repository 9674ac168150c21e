"""Each named place to die, once: whatever it leaves behind, the run ends with the weights of the undisturbed one."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from contracts.errors import InvalidInput
from contracts.jobs import JobState
from contracts.spec import JobSpec
from telemetry.crash_points import CRASH_POINTS, arm
from tests.builders import job_spec
from tests.pipeline import Pipeline, wait_for_exit

TRAINER_POINTS = [name for name in CRASH_POINTS if name.startswith("consumer.")]
GENERATOR_POINTS = [name for name in CRASH_POINTS if name.startswith("producer.")]


def spec(schedule: str) -> JobSpec:
    return job_spec(
        schedule=schedule,
        iterations=20,
        model__path="configs/models/two-digit-addition",
        optimizer__learning_rate=1e-3,
        trainer__checkpoint_every_iterations=2,
        evaluation__every_iterations=5,
        # Short leases: a dead process is replaced in a second.
        timeouts__trainer_lease_s=1.0,
        timeouts__generator_lease_s=1.0,
        rollout__max_attempts=100,
    )


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("chaos")) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    generator = pipeline.start("producer-oracle")
    digest = pipeline.final_digest(pipeline.train(spec("synchronous")))
    generator.stop(grace_s=10.0)
    return digest


def test_every_place_where_a_trainer_can_die_is_healed_by_its_successor(pipeline: Pipeline, oracle: str) -> None:
    job_id, _ = pipeline.jobs.create(spec("periodic"))
    generator = pipeline.start("producer-steady")
    for point in TRAINER_POINTS:
        # A trainer opens only its first iteration by itself, so that it gets to that point once.
        nth = 1 if point == "consumer.after_opening" else 2
        exit_code = pipeline.train_until_death(job_id, crash_at=f"{point}:{nth}")
        assert exit_code == -signal.SIGKILL, f"{point} was never reached: exit code {exit_code}"
    pipeline.train_to_the_end(job_id)
    generator.stop(grace_s=10.0)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()


def test_every_place_where_a_generator_can_die_is_healed_by_another(pipeline: Pipeline, oracle: str) -> None:
    job_id, _ = pipeline.jobs.create(spec("periodic"))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    for point in GENERATOR_POINTS:
        generator = pipeline.start(f"producer-{point}", crash_at=f"{point}:2")
        wait_for_exit(generator)
        assert generator.exit_code == -signal.SIGKILL, f"{point} was never reached:\n{generator.tail()}"
    generator = pipeline.start("producer-survivor")
    wait_for_exit(trainer)
    generator.stop(grace_s=10.0)
    assert trainer.exit_code == 0, trainer.tail()
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_CRASH_AT: `nowhere` is not a crash point"):
        arm("nowhere")
