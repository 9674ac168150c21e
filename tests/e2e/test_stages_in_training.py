"""What stages make reaches the learner: a reference off the trainer changes no bit, a teacher and a reward are learnt.

The stages are served by a thread of the test, with the broker and the numerics of a stage worker (consumer/stages).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.connection.roles import STAGE
from broker.presence import StagePresence
from broker.stage_side import ClaimedItem, StageSide
from consumer.gradient.assembly import load_frozen
from consumer.gradient.log_probs import frozen_logprobs
from contracts.encoding.arrays import pack_float32
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.experience.columns import ColumnValues
from contracts.jobs import EvaluationScore, JobState
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.spec_tables.stages import ReferenceStage, StageSpec, TeacherStage
from tests.builders import job_spec
from tests.pipeline import Pipeline, wait_for_exit

STUDENT = "configs/models/two-digit-addition"
TEACHER = {"type": "teacher", "model": "configs/models/two-digit-addition-teacher"}
BRIEF = {
    "type": "external",
    "name": "brief",
    "inputs": ["completion_ids"],
    "outputs": [{"name": "tokens", "type": "float32"}],
    "unit": "group",
    "reward_column": "tokens",
    "weight": -0.125,
}
ITERATIONS = 4
KL_JOBS: dict[str, dict[str, object]] = {
    "two updates, several passes": {
        "algorithm__kl_coefficient": 0.05,
        "algorithm__updates_per_iteration": 2,
        "trainer__max_tokens_per_micro_batch": 300,
    },
    "adapters over a model that two ranks share, KL in the reward": {
        "algorithm__kl_coefficient": 0.1,
        "algorithm__kl_placement": "reward",
        "algorithm__kl_estimator": "k1",
        "trainer__lora": {"rank": 4},
        "trainer__world_size": 2,
        "trainer__sharding": "fsdp",
    },
}
Values = Callable[[ClaimedItem], ColumnValues]
T = TypeVar("T", IterationMetrics, EvaluationScore)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("stages")) as pipeline:
        pipeline.start_generators(1)
        yield pipeline


def spec(**changes: object) -> JobSpec:
    fields: dict[str, object] = {
        "iterations": ITERATIONS,
        "model__path": STUDENT,
        "rollout__prompts_per_batch": 8,
        "optimizer__learning_rate": 1e-3,
        "trainer__checkpoint_every_iterations": 2,
        "evaluation__num_prompts": 0,
        "timeouts__trainer_lease_s": 1.0,
    }
    return job_spec(**(fields | changes))


@contextlib.contextmanager
def served(pipeline: Pipeline, job_id: str) -> Iterator[None]:
    """Inside, a thread serves the job's stages."""
    broker = connect(replace(pipeline.settings, redis_url=pipeline.redis.url_of(STAGE)))
    stages, ended, errors = pipeline.jobs.spec(job_id).stages, threading.Event(), []
    makers = {stage.name: values_of(pipeline, job_id, stage) for stage in stages}

    def serve() -> None:
        try:
            serve_until(ended, broker, job_id, makers)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert errors == []


def serve_until(ended: threading.Event, broker: Broker, job_id: str, makers: dict[str, Values]) -> None:
    side = StageSide(broker, job_id, "stage-worker")
    while not ended.is_set():
        StagePresence(broker, [f"{job_id}/{name}" for name in makers]).beat("stage-worker", {})
        items = [item for name in makers for item in side.claim(name, 1000)]
        side.put([(item, makers[item.stage](item)) for item in items])
        if not items:
            side.wait(0.2)


def values_of(pipeline: Pipeline, job_id: str, stage: StageSpec) -> Values:
    job = pipeline.jobs.spec(job_id)
    if isinstance(stage, ReferenceStage | TeacherStage):
        path = stage.model if isinstance(stage, TeacherStage) else job.model.path
        frozen, (column,) = load_frozen(pipeline.settings, job, path=path), stage.outputs
        return lambda item: {column.name: frozen_logprobs(frozen, item.batch, spec=job)}
    return lambda item: {"tokens": [pack_float32([len(ids) / 4]) for ids in item.inputs["completion_ids"]]}


def train(pipeline: Pipeline, job: JobSpec, *, crash_at: str = "") -> str:
    job_id, _ = pipeline.jobs.create(job)
    with served(pipeline, job_id):
        if crash_at:
            assert pipeline.train_until_death(job_id, crash_at=crash_at) == -signal.SIGKILL
        pipeline.train_to_the_end(job_id)
    assert pipeline.verdict(job_id).gaps == ()
    return job_id


@pytest.mark.parametrize("name", KL_JOBS)
def test_a_reference_that_is_a_stage_leaves_the_weights_of_one_in_the_trainer(pipeline: Pipeline, name: str) -> None:
    alone = pipeline.train(spec(**KL_JOBS[name]))
    staged = train(pipeline, spec(**KL_JOBS[name], stages=[{"type": "reference"}]))
    assert pipeline.final_digest(staged) == pipeline.final_digest(alone)


def test_a_teacher_and_a_reward_are_learnt_alike_by_two_ranks_and_after_a_kill(pipeline: Pipeline) -> None:
    fields: dict[str, object] = {
        "algorithm__distillation_coefficient": 1.0,
        "stages": [TEACHER, BRIEF],
        "evaluation__num_prompts": 16,
        "evaluation__prompts_per_batch": 16,
    }
    undisturbed = train(pipeline, spec(**fields, trainer__world_size=2))
    killed = train(pipeline, spec(**fields), crash_at=f"consumer.after_step:{ITERATIONS}")
    assert pipeline.final_digest(killed) == pipeline.final_digest(undisturbed)
    chain = [record for record in pipeline.jobs.audit(undisturbed) if record.next_weights_digest]
    assert [set(record.columns or ()) for record in chain] == [
        {f"{iteration}/train/{index}" for index in range(4)} for iteration in range(ITERATIONS)
    ]
    metrics = lines_of(pipeline, undisturbed, "metrics.jsonl", IterationMetrics)
    divergences = [one.kl_to_teacher for one in metrics]
    assert all(isinstance(one, float) and one > 0.0 for one in divergences)
    for one in metrics:
        assert one.reward_components["tokens"] == pytest.approx(one.response_tokens_mean)
        assert one.reward_mean == pytest.approx(one.reward_components["exact"] - 0.125 * one.response_tokens_mean)
    # Evaluations pass no stage: each of their 16 sums is right or wrong.
    scores = lines_of(pipeline, undisturbed, "evaluations.jsonl", EvaluationScore)
    assert [(16 * one.sampled) % 1.0 for one in scores] == [0.0, 0.0]


def test_a_job_whose_stage_has_no_worker_fails_by_its_name(pipeline: Pipeline) -> None:
    job = spec(stages=[BRIEF], timeouts__no_stage_worker_s=1.0)
    job_id, _ = pipeline.jobs.create(job)
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    wait_for_exit(trainer)
    assert trainer.exit_code == 2
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    assert "s for a live worker of stage brief" in pipeline.jobs.fields(job_id)["reason"].decode()


def lines_of(pipeline: Pipeline, job_id: str, name: str, kind: type[T]) -> list[T]:
    lines = (RunFolder(pipeline.settings.run_root_path, job_id).path / name).read_bytes().splitlines()
    return [decode_json(line, kind) for line in lines]
