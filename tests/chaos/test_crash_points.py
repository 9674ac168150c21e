"""A process dies once at each crash point: the run ends with the weights of the undisturbed one."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from broker.monitor import job_status
from contracts.errors import InvalidInput
from contracts.events import MemoryMeasured, TrainerStarted
from contracts.jobs import JobState
from contracts.spec.job import JobSpec
from onbeat.base.process.crash_points import CRASH_POINTS, arm
from tests.chaos.short_job import LAG, assert_undisturbed, long_variant, running, sequential_digest, short_job, succeed
from tests.pipeline import Pipeline, wait_for_exit

LAGGING_POINTS = ["consumer.saving_older_versions", "consumer.publishing_older_versions"]
"""Only trainers of a job with a lag get there."""
COPY_POINTS = ["consumer.keeping_files", "consumer.after_files_kept"]
"""Only trainers whose run folders are copied elsewhere get there: tests/chaos/test_lost_hosts.py."""
ELSEWHERE = (*LAGGING_POINTS, *COPY_POINTS)
TRAINER_POINTS = [name for name in CRASH_POINTS if name.startswith("consumer.") and name not in ELSEWHERE]
DRY_PASS = "consumer.in_dry_pass"
"""Only trainers of a job that has committed nothing get there."""
LOADING, RECEIVING = "producer.loading_weights", "producer.receiving_weights"
"""Only generators of a job with a lag get there."""
TURN_POINTS = ["producer.after_turn", "producer.after_step"]
"""Only generators of a job with an environment get there: tests/e2e/test_turns.py."""
SHARING = "producer.sharing_steps"
GENERATOR_POINTS = [
    SHARING,
    *(name for name in CRASH_POINTS if name.startswith("producer.") and name not in (SHARING, RECEIVING, *TURN_POINTS)),
]
"""The dead count as alive for a while, and among several a generator takes one batch at a time: none shares then."""


JOB = short_job(iterations=20, evaluation__every_iterations=5, recording={})
"""Long enough for a death at every place."""
MEASURED = {"type": "addition", "difficulty_pools": {"easy_fraction": 0.3, "hard_fraction": 0.3}}
LAGGING = short_job(
    iterations=26, evaluation__every_iterations=1, evaluation__num_prompts=4, recording={}, dataset=MEASURED, **LAG
)
"""Each of its commits leaves an evaluation to be sent out, and decides what a later iteration draws."""


@pytest.mark.parametrize("job", [pytest.param(JOB, marks=long_variant), LAGGING], ids=["periodic", "delayed"])
def test_every_place_where_a_trainer_can_die_is_healed_by_its_successor(
    pipeline: Pipeline, tmp_path: Path, job: JobSpec
) -> None:
    """A trainer that opens a window dies after its first iteration is open, and before the others are."""
    job_id, _ = pipeline.jobs.create(job)
    with running(pipeline, "producer-steady"):
        for point in TRAINER_POINTS + LAGGING_POINTS * (job is LAGGING):
            # A trainer opens only its first iteration by itself, and makes one dry pass.
            nth = 1 if point in ("consumer.after_opening", DRY_PASS) else 2
            exit_code = pipeline.train_until_death(job_id, crash_at=f"{point}:{nth}")
            assert exit_code == -signal.SIGKILL, f"{point} was never reached: exit code {exit_code}"
        pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, job, tmp_path))


@pytest.mark.parametrize("job", [JOB, pytest.param(LAGGING, marks=long_variant)], ids=["periodic", "delayed"])
def test_every_place_where_a_generator_can_die_is_healed_by_another(
    pipeline: Pipeline, tmp_path: Path, job: JobSpec
) -> None:
    job_id, _ = pipeline.jobs.create(job)
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    for point in GENERATOR_POINTS:
        # Under a lag a generator loads its first version alone; the others it receives beside that one.
        nth = 1 if job is LAGGING and point == LOADING else 2
        generator = pipeline.start(f"producer-{point}", crash_at=f"{point}:{nth}")
        wait_for_exit(generator)
        assert generator.exit_code == -signal.SIGKILL, f"{point} was never reached:\n{generator.tail()}"
    with running(pipeline, "producer-survivor"):
        succeed(trainer)
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, job, tmp_path))


def test_a_generator_that_dies_while_it_receives_a_version_beside_a_batch_is_healed_by_another(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    lagging = short_job(schedule="delayed", max_policy_lag=1, algorithm__correction="none")
    job_id, _ = pipeline.jobs.create(lagging)
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    generator = pipeline.start("producer-receiving", crash_at=RECEIVING)
    wait_for_exit(generator)
    assert generator.exit_code == -signal.SIGKILL, f"{RECEIVING} was never reached:\n{generator.tail()}"
    with running(pipeline, "producer-after"):
        succeed(trainer)
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, lagging, tmp_path))


def test_trainers_that_are_killed_in_the_dry_pass_again_and_again_cost_nothing_and_are_no_want_of_memory(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    brief = short_job(iterations=2, evaluation__num_prompts=0)
    job_id, _ = pipeline.jobs.create(brief)
    with running(pipeline, "producer-of-dry-passes"):
        for _ in range(3):
            assert pipeline.train_until_death(job_id, crash_at=DRY_PASS) == -signal.SIGKILL
            status = job_status(pipeline.broker, job_id)
            assert (status.state, "memory" in status.reason) == (JobState.RUNNING, False)
        pipeline.train_to_the_end(job_id)
    events = [event for _, event in pipeline.jobs.events_after(job_id, "0")]
    assert len([event for event in events if isinstance(event, TrainerStarted)]) == 4
    # Those that were killed didn't get to say what they had measured.
    assert len([event for event in events if isinstance(event, MemoryMeasured)]) == 1
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, brief, tmp_path))


def test_an_unknown_crash_point_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_CRASH_AT: `nowhere` is not a crash point"):
        arm("nowhere")


@long_variant
def test_a_generator_that_dies_among_batches_that_share_steps_is_copied_and_replaced_to_the_bit(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    """Another generator lives beside it: it copies what the dead one held, before the leases expire."""
    job_id, _ = pipeline.jobs.create(JOB)
    doomed = [pipeline.start(f"producer-shared-{nth}", crash_at=f"{SHARING}:{nth}") for nth in (2, 6)]
    with running(pipeline, "producer-beside"):
        trainer = pipeline.start(f"consumer-{job_id}", job_id)
        for generator in doomed:
            wait_for_exit(generator)
            assert generator.exit_code == -signal.SIGKILL, generator.tail()
        succeed(trainer)
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, JOB, tmp_path))
    counters: dict[bytes, bytes] = pipeline.broker.redis.hgetall(pipeline.broker.job_keys(job_id).counters)  # type: ignore[assignment]
    assert int(counters.get(b"hedged", 0)) > 0
