"""A job with an environment keeps the promise of test_same_weights.py (I7): whatever dies between two of its turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import UNSET, convert
from msgspec.structs import replace

from broker.monitor import job_status
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.jobs import ResumeRequest
from contracts.rewards import ExactReward, RewardSpec
from contracts.run_folder import RunFolder
from contracts.spec.datasets import MixtureDataset
from contracts.spec.job import JobSpec
from gateway.run_files import iteration_metrics
from onbeat.base.process.child_process import ChildProcess
from tests.chaos.short_job import (
    DEADLINE_S,
    assert_undisturbed,
    committed,
    long_variant,
    running,
    short_job,
    undisturbed_digest,
    until,
)
from tests.pipeline import Pipeline, wait_for_exit
from tests.played import FORGETFUL, PLUGIN, needs

FAILED = 2
JOB_DATASET = {"type": "environment", "num_train_prompts": 64}
SUMS = {"prompt": "sum", "reference": "answers.reversed"}
JOB = short_job(
    iterations=4,
    model__path="configs/models/secret-table",
    dataset=JOB_DATASET,
    environment=FORGETFUL,
    reward__components=[],
)

TWO_AND_SUMS: list[dict[str, Any]] = [
    {"name": "secrets", "weight": 2, "dataset": JOB_DATASET, "environment": FORGETFUL},
    {
        "name": "echoed",
        "dataset": {"type": "jsonl", "train_path": "tests/e2e/easy_sums.jsonl", "columns": SUMS},
        "environment": FORGETFUL
        | {"name": "echo", "file": "", "source": "", "params": {"turns": 2}, "on_failure": -1.0},
    },
    {"name": "sums", "dataset": {"type": "addition"}},
]
MIXTURE = replace(
    JOB,
    dataset=convert({"type": "mixture", "sources": TWO_AND_SUMS}, MixtureDataset),
    environment=None,
    reward=RewardSpec(components=(ExactReward(sources=("sums",)),)),
)
"""Two environments, of their own tasks and of rows, and sums that have one turn."""


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    needs("secret_table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")]))
        with Pipeline(tmp_path_factory.mktemp("turns")) as pipeline:
            yield pipeline


def killed_again(pipeline: Pipeline, **changes: Any) -> ChildProcess:
    """Kills the reward service with all that it holds, and starts it anew."""
    service = pipeline.children["reward_service"]
    if service.exit_code is None:
        assert service.pid is not None
        os.kill(service.pid, signal.SIGKILL)
    assert wait_for_exit(service, DEADLINE_S) == -signal.SIGKILL
    return pipeline.start_reward_service(**changes)


def death_of(pipeline: Pipeline, child: ChildProcess) -> int:
    """Waits for the end of a process, while the reward service is started again where it has died."""

    def ended() -> bool:
        if pipeline.children["reward_service"].exit_code is not None:
            killed_again(pipeline)
        return child.exit_code is not None

    until(ended, f"{child.name} to end")
    return wait_for_exit(child)


@pytest.mark.parametrize(
    ("job", "point"),
    [
        pytest.param(JOB, "producer.after_step", id="one environment"),
        pytest.param(JOB, "producer.after_turn", id="one environment, before its reply", marks=long_variant),
        pytest.param(MIXTURE, "producer.after_step", id="a mixture", marks=long_variant),
    ],
)
def test_reward_service_generator_and_trainer_die_between_turns_and_the_weights_are_the_same(
    pipeline: Pipeline, job: JobSpec, point: str
) -> None:
    """The service dies with replies that it has not answered: the sessions of its successor are played to there."""
    with running(pipeline, "producer-oracle"):
        oracle = undisturbed_digest(pipeline, job)
    service = killed_again(pipeline, crash_at="environment.after_play:9")
    job_id, _ = pipeline.jobs.create(job)
    trainer = pipeline.start(f"consumer-{job_id}", job_id, crash_at="consumer.after_step:2")
    generator = pipeline.start(f"producer-{point}", crash_at=f"{point}:3")
    assert death_of(pipeline, generator) == -signal.SIGKILL, generator.tail()
    with running(pipeline, "producer-second"):
        assert death_of(pipeline, trainer) == -signal.SIGKILL, trainer.tail()
        pipeline.train_to_the_end(job_id)
    assert service.exit_code == -signal.SIGKILL, service.tail()
    assert_undisturbed(pipeline, job_id, oracle)
    folder = RunFolder(pipeline.settings.run_root_path, job_id)
    metrics = [decode_json(line, IterationMetrics) for line in folder.metrics.read_bytes().splitlines()]
    assert {one.iteration for one in metrics} == set(range(JOB.iterations))
    if job is MIXTURE:
        assert metrics[0].source_rewards
        assert metrics[0].source_rewards.keys() == {"secrets", "echoed", "sums"}
        assert metrics[0].trajectories
        assert "echoed/right" in metrics[0].trajectories.environment
        played = {record.environment for record in pipeline.jobs.audit(job_id) if record.kind == "commit"}
        assert [str(one).partition(" ")[0] for one in played] == ["secrets:"]
        assert str(played.pop()).endswith("; echoed: environment-plugin 1.0")
    # Those of two turns began anew.
    assert all(one.trajectories is not UNSET and one.trajectories.turns_max > 1 for one in metrics)


@long_variant
def test_an_environment_that_raises_at_a_message_ends_its_job_until_a_resume_states_a_score_which_no_death_changes(
    pipeline: Pipeline,
) -> None:
    killed_again(pipeline)
    picky = replace(JOB.environment, name="picky", file="", source="", max_attempts=2) if JOB.environment else None
    spec = replace(JOB, iterations=3, environment=picky, rollout=replace(JOB.rollout, max_attempts=2))
    job_id, _ = pipeline.jobs.create(spec)
    with running(pipeline, "producer-picky"):
        assert pipeline.train_until_death(job_id) == FAILED
    assert "environment `picky`" in (reason := job_status(pipeline.broker, job_id).reason)
    assert "raised: KeyError" in reason
    pipeline.jobs.resume(job_id, ResumeRequest(on_failure={"environment": -1.0}))
    generator = pipeline.start("producer-dies", crash_at="producer.after_step:2")
    trainer = pipeline.start(f"consumer-{job_id}-resumed", job_id)
    assert wait_for_exit(generator, DEADLINE_S) == -signal.SIGKILL, generator.tail()
    with running(pipeline, "producer-calm-again"):
        assert wait_for_exit(trainer, DEADLINE_S) == 0, trainer.tail()
        assert_undisturbed(pipeline, job_id, undisturbed_digest(pipeline, pipeline.jobs.spec(job_id)))
    commits = [record for record in pipeline.jobs.audit(job_id) if record.unscorable is not UNSET]
    assert all(record.on_unscorable == {"environment": -1.0} for record in commits)
    assert {reason for record in commits for counts in (record.unscorable or {}).values() for reason in counts} == {
        "environment: raised"
    }
    for numbers in iteration_metrics(RunFolder(pipeline.settings.run_root_path, job_id)).records():
        (record,) = [one for one in commits if one.iteration == numbers.iteration] or [None]
        counted = (record.unscorable or {}) if record else {}
        trained = sum(sum(counts.values()) for batch, counts in counted.items() if "/train/" in batch)
        assert numbers.trajectories is not UNSET
        assert (numbers.num_unscorable, numbers.trajectories.failed_share * numbers.num_completions) == (
            trained,
            trained,
        )


@long_variant
@pytest.mark.parametrize("seed", [0, 1])
def test_the_reward_service_dies_again_and_again(pipeline: Pipeline, seed: int) -> None:
    job = replace(JOB, iterations=12, seed=seed)
    with running(pipeline, "producer-calm"):
        digest = undisturbed_digest(pipeline, job)
    job_id, _ = pipeline.jobs.create(job)
    with running(pipeline, "producer-first"), running(pipeline, "producer-second"):
        trainer = pipeline.start(f"consumer-{job_id}", job_id)
        for count in range(1, 10, 2):
            until(committed(pipeline, job_id, count), f"iteration {count}")
            killed_again(pipeline)
        wait_for_exit(trainer, DEADLINE_S)
    assert_undisturbed(pipeline, job_id, digest)
