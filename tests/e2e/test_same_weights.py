"""On-policy is proven: schedules, generators, kills and stops leave the final weights bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.fence import read_fence
from broker.presence import Presence
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.weights import DeltaWeights, RedisWeights, WeightsSpec
from tests.building.specs import trained_job
from tests.chaos.short_job import long_variant, sequential_digest
from tests.pipeline import DEADLINE_S, Pipeline, wait_for_exit
from tests.until import until

NUM_GENERATORS = 1


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """Final digest of the undisturbed synchronous run with one generator."""
    job_id = pipeline.train(spec(schedule="synchronous"))
    assert pipeline.verdict(job_id).gaps == ()
    return pipeline.final_digest(job_id)


spec = trained_job.but(
    iterations=6,
    rollout__prompts_per_batch=8,
    evaluation__num_prompts=32,
    evaluation__prompts_per_batch=16,
    evaluation__every_iterations=3,
    timeouts__trainer_lease_s=2.0,
)


def until_committed(pipeline: Pipeline, job_id: str, count: int) -> None:
    until(lambda: len(pipeline.jobs.audit(job_id)) >= count, f"{count} commits", deadline_s=DEADLINE_S)


def test_periodic_gives_the_weights_of_synchronous_with_one_generator_and_with_two(
    pipeline: Pipeline, oracle: str
) -> None:
    with_one = pipeline.train(spec(schedule="periodic"))
    pipeline.start_generators(2)
    with_two = pipeline.train(spec(schedule="periodic"))
    for job_id in (with_one, with_two):
        assert pipeline.final_digest(job_id) == oracle
        assert pipeline.verdict(job_id).gaps == ()


def test_as_sampled_a_trainer_has_the_log_probs_of_its_generators_and_a_killed_one_the_same_weights(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    asked = spec(schedule="periodic", trainer__packing="as_sampled", trainer__on_mismatch="fail")
    job_id, _ = pipeline.jobs.create(asked)
    first = pipeline.start(f"consumer-{job_id}-first", job_id)
    until_committed(pipeline, job_id, 3)
    first.kill()
    pipeline.train_to_the_end(job_id)
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    metrics = [decode_json(line, IterationMetrics) for line in folder.metrics.read_bytes().splitlines()]
    # A replayed iteration has a line for each time it was trained.
    assert {one.iteration: one.mismatch_max for one in metrics} == dict.fromkeys(range(asked.iterations), 0.0)
    assert pipeline.final_digest(job_id) == sequential_digest(pipeline, asked, tmp_path)


def test_another_seed_gives_other_weights(pipeline: Pipeline, oracle: str) -> None:
    assert pipeline.final_digest(pipeline.train(spec(seed=1))) != oracle


@pytest.mark.parametrize("weights", [DeltaWeights(snapshot_every_versions=3), RedisWeights()])
def test_every_transport_gives_the_same_weights_also_when_the_trainer_is_killed(
    pipeline: Pipeline, oracle: str, weights: WeightsSpec
) -> None:
    job_id, _ = pipeline.jobs.create(spec(weights=weights))
    first = pipeline.start(f"consumer-{job_id}-first", job_id)
    until_committed(pipeline, job_id, 3)
    first.kill()
    pipeline.train_to_the_end(job_id)
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()


def test_a_stopped_trainer_saves_and_its_successor_goes_on_without_a_replay(pipeline: Pipeline, oracle: str) -> None:
    job_id, _ = pipeline.jobs.create(spec(trainer__checkpoint_every_iterations=100))
    first = pipeline.start(f"consumer-{job_id}-first", job_id)
    until_committed(pipeline, job_id, 2)
    first.terminate()
    wait_for_exit(first)
    assert first.exit_code == 0, first.tail()
    assert pipeline.jobs.state(job_id) is JobState.RUNNING
    second = pipeline.start(f"consumer-{job_id}-second", job_id)
    wait_for_exit(second)
    assert second.exit_code == 0, second.tail()
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).rewinds == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model__path": "no/such/model"}, "model.path: no folder"),
        ({"reward__components": [{"type": "plugin", "entry_point": "absent"}]}, "is dead, after"),
        (
            {"trainer__mismatch_alarm": 1e-30, "trainer__on_mismatch": "fail"},
            "mismatch_k3: in iteration 0 trainer and generator log-probs differ",
        ),
        ({"rollout__sampling": {"max_new_tokens": 5000}}, "rollout.sampling.max_new_tokens"),
    ],
)
def test_a_job_that_cannot_run_fails_with_a_reason_that_names_the_field(
    pipeline: Pipeline, changes: dict[str, object], reason: str
) -> None:
    job_id, _ = pipeline.jobs.create(spec(**changes))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    wait_for_exit(trainer)
    assert trainer.exit_code == 2
    assert "Traceback" not in trainer.tail()
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    assert reason in pipeline.jobs.fields(job_id)["reason"].decode()


@long_variant
def test_a_generator_of_another_kind_of_engine_leaves_a_deterministic_job_to_the_first_kind(
    pipeline: Pipeline, oracle: str
) -> None:
    """Another number of threads adds up in another order, so its last bits are others."""
    job_id, _ = pipeline.jobs.create(spec())
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    until_committed(pipeline, job_id, 1)
    for name in [name for name in pipeline.children if name.startswith("producer")]:
        pipeline.children.pop(name).stop()
    other = pipeline.start("producer-other", threads=2)
    until(
        lambda: any(job_id in worker.wrong_engine for worker in Presence(pipeline.broker).live()),
        "the other kind to be refused",
    )
    pipeline.start_generators(1)
    wait_for_exit(trainer, DEADLINE_S)
    other.stop()
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()
    assert "threads 1" in read_fence(pipeline.broker, pipeline.broker.job_keys(job_id)).engine
