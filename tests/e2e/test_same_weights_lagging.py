"""A lag is repeatable: what samples a batch is a function of its iteration, and the weights are those of one process.

The oracle has no part of what it judges: no Redis, no window, no generator (tests/sequential_execution.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from tests.builders import CHANGED_LOGITS
from tests.building.specs import trained_job
from tests.chaos.short_job import long_variant, running
from tests.forked import STAGE_WORKER
from tests.pipeline import Pipeline
from tests.sequential_execution import digests_of_versions

pytestmark = pytest.mark.usefixtures("forked_ranks")

NUM_GENERATORS = 1

ITERATIONS = 6
LORA: dict[str, object] = {
    "max_policy_lag": 1,
    "trainer__lora": {"rank": 4, "publish": "adapter"},
    "algorithm__kl_coefficient": 0.01,
    "optimizer__learning_rate": 2e-3,
}
JOBS: dict[str, dict[str, object]] = {
    "lag 1, two updates of two mini-batches": {
        "max_policy_lag": 1,
        "algorithm__correction": "decoupled_ppo",
        "algorithm__updates_per_iteration": 2,
        "algorithm__mini_batches": 2,
        "algorithm__kl_coefficient": 0.01,
    },
    "lag 2, changed": {"rollout__sampling": CHANGED_LOGITS},
    "LoRA, lag 1": LORA,
}


lagging_job = trained_job.but(
    iterations=ITERATIONS,
    schedule="delayed",
    max_policy_lag=2,
    algorithm__correction="tis",
    rollout__prompts_per_batch=4,
    evaluation__num_prompts=8,
    evaluation__prompts_per_batch=4,
    evaluation__every_iterations=3,
)
SPECS = {name: lagging_job.but(**fields) for name, fields in JOBS.items()}


@pytest.fixture(scope="module")
def oracles(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Job → digest of each version that its sequential execution makes."""
    return {
        job: digests_of_versions(SPECS[job](), pipeline.settings, tmp_path_factory.mktemp("oracle")) for job in JOBS
    }


def assert_versions(pipeline: Pipeline, job_id: str, digests: list[str]) -> None:
    """Asserts that the last commit of each iteration sampled and made the versions of the oracle."""
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    last = {record.iteration: record for record in pipeline.jobs.audit(job_id) if record.kind == "commit"}
    lag = pipeline.jobs.spec(job_id).max_policy_lag
    for iteration in range(len(digests) - 1):
        record = last[iteration]
        assert (record.weights_digest, record.next_weights_digest) == (digests[iteration], digests[iteration + 1])
        sampled = [(by.policy_version, by.weights_digest) for by in record.sampled or ()]
        sampler = max(0, iteration - lag)
        assert sampled == ([(sampler, digests[sampler])] if sampler < iteration else [])
    assert pipeline.verdict(job_id).gaps == ()


@pytest.mark.parametrize("job", JOBS)
def test_a_delayed_job_makes_the_versions_of_its_sequential_execution(
    pipeline: Pipeline, oracles: dict[str, list[str]], job: str
) -> None:
    job_id = pipeline.train(SPECS[job]())
    assert_versions(pipeline, job_id, oracles[job])
    lines = RunFolder(pipeline.settings.run_root_path, job_id).metrics.read_bytes().splitlines()
    lags = [decode_json(line, IterationMetrics).lag_counts for line in lines]
    largest = SPECS[job]().max_policy_lag
    assert lags == [tuple(4 * (lag == min(largest, number)) for lag in range(largest + 1)) for number in range(6)]


@long_variant
def test_a_lagging_job_whose_reference_is_a_stage_makes_the_versions_of_its_sequential_execution(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    fields: dict[str, object] = {"max_policy_lag": 1, "algorithm__kl_coefficient": 0.1}
    digests = digests_of_versions(SPECS["lag 2, changed"](**fields), pipeline.settings, tmp_path)
    with running(pipeline, f"{STAGE_WORKER}-1"):
        job_id = pipeline.train(SPECS["lag 2, changed"](**fields, stages=[{"type": "reference", "lease_s": 1.0}]))
    assert_versions(pipeline, job_id, digests)
    unheeded = digests_of_versions(SPECS["lag 2, changed"](max_policy_lag=1), pipeline.settings, tmp_path / "without")
    assert unheeded[-1] != digests[-1], "the reference counts"


@pytest.mark.parametrize(
    ("job", "changes", "crash_at"),
    [
        pytest.param("lag 2, changed", {}, "consumer.after_opening:2", id="between two openings"),
        pytest.param(
            "lag 2, changed",
            {"weights": {"transport": "delta", "snapshot_every_versions": 3}},
            "consumer.after_commit:4",
            marks=long_variant,
            id="delta",
        ),
        pytest.param("lag 2, changed", {"weights": {"transport": "redis"}}, "consumer.after_checkpoint:1", id="redis"),
        pytest.param(
            "lag 2, changed",
            {"trainer__world_size": 2, "trainer__sharding": "fsdp"},
            "consumer.after_weights:5",
            marks=[long_variant],
            id="fsdp",
        ),
        pytest.param("LoRA, lag 1", {}, "consumer.after_commit:3", id="adapters"),
        pytest.param(
            "LoRA, lag 1",
            {"weights": {"transport": "redis"}, "trainer__world_size": 2},
            "consumer.after_checkpoint:2",
            marks=[long_variant],
            id="adapters by redis, two ranks",
        ),
        pytest.param(
            "lag 1, two updates of two mini-batches", {}, "consumer.after_step:9", marks=long_variant, id="two updates"
        ),
    ],
)
def test_a_killed_trainer_and_three_generators_make_the_same_versions(
    pipeline: Pipeline, oracles: dict[str, list[str]], job: str, changes: dict[str, object], crash_at: str
) -> None:
    for number in (2, 3):
        if f"producer-{number}" not in pipeline.children:
            pipeline.start(f"producer-{number}")
    job_id, _ = pipeline.jobs.create(SPECS[job](**changes))
    # The death of a rank that isn't the first ends its launcher with a code of its own.
    assert pipeline.train_until_death(job_id, crash_at=crash_at) not in (0, 2)
    pipeline.train_to_the_end(job_id)
    assert_versions(pipeline, job_id, oracles[job])


def test_a_bounded_job_takes_versions_of_its_range_alone_and_finishes(pipeline: Pipeline) -> None:
    job_id = pipeline.train(SPECS["lag 2, changed"](schedule="bounded", deterministic=False))
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert pipeline.verdict(job_id).gaps == ()
    for record in pipeline.jobs.audit(job_id):
        assert {by.policy_version for by in record.sampled or ()} <= set(range(record.iteration - 2, record.iteration))
