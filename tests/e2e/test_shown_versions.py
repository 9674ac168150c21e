"""Each version that samples was shown first, in every schedule; the weights are those of a job without probes (I11)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.building.specs import trained_job
from tests.chaos.short_job import LAG, sequential_digest
from tests.pipeline import Pipeline

NUM_GENERATORS = 1
ITERATIONS = 3
KIND = "transformers float32"

spec = trained_job.but(iterations=ITERATIONS, rollout__prompts_per_batch=8, evaluation__num_prompts=0)
SCHEDULES: dict[str, dict[str, Any]] = {
    "periodic": {},
    "colocated": {"schedule": "colocated"},
    "delayed": LAG,
}
BOUNDED: dict[str, Any] = {
    "schedule": "bounded",
    "max_policy_lag": 2,
    "deterministic": False,
    "algorithm__correction": "tis",
}
EVALUATED: dict[str, Any] = {"evaluation": {"num_prompts": 8, "prompts_per_batch": 8, "every_iterations": 0}}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_version_that_samples_is_shown_and_the_weights_are_those_of_a_job_without_probes(
    pipeline: Pipeline, tmp_path: Path, schedule: str
) -> None:
    job = spec(**SCHEDULES[schedule])
    job_id = pipeline.train(job, colocated_threads=1)
    num_samplers = len({max(0, iteration - job.max_policy_lag) for iteration in range(ITERATIONS)})
    assert counters(pipeline, job_id)["proved"] >= num_samplers
    assert refusals(pipeline, job_id) == 0
    assert pipeline.verdict(job_id).gaps == ()
    assert pipeline.final_digest(job_id) == sequential_digest(pipeline, job, tmp_path)


def test_a_job_without_probes_shows_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    job_id = pipeline.train(spec(rollout__probe={"rows": 0}))
    assert "proved" not in counters(pipeline, job_id)
    assert pipeline.broker.redis.exists(pipeline.broker.job_keys(job_id).probes) == 0
    assert pipeline.final_digest(job_id) == sequential_digest(pipeline, spec(), tmp_path)


def test_the_version_of_the_last_evaluation_is_shown_too(pipeline: Pipeline) -> None:
    job_id = pipeline.train(spec(**EVALUATED))
    assert counters(pipeline, job_id)["proved"] == ITERATIONS + 1
    assert refusals(pipeline, job_id) == 0


def test_a_trainer_that_computes_as_its_engine_does_leaves_no_gap(pipeline: Pipeline) -> None:
    job_id = pipeline.train(spec(trainer__packing="as_sampled"))
    packed: Any = pipeline.broker.redis.hget(pipeline.broker.job_keys(job_id).proofs, f"first {KIND}")
    assert msgspec.msgpack.decode(packed)["gap"] == 0
    assert refusals(pipeline, job_id) == 0, "the bound of later versions is 0"


def test_the_newest_version_that_a_bounded_job_samples_with_is_shown(pipeline: Pipeline) -> None:
    job_id = pipeline.train(spec(**BOUNDED))
    assert counters(pipeline, job_id)["proved"] >= 1
    assert refusals(pipeline, job_id) == 0
    assert pipeline.verdict(job_id).gaps == ()


def counters(pipeline: Pipeline, job_id: str) -> dict[str, int]:
    answer: Any = pipeline.broker.redis.hgetall(pipeline.broker.job_keys(job_id).counters)
    return {name.decode(): int(count) for name, count in answer.items()}


def refusals(pipeline: Pipeline, job_id: str) -> int:
    counted = counters(pipeline, job_id)
    return sum(counted.get(f"proof_{reason}", 0) for reason in ("far", "stale", "not_finite"))
