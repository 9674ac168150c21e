"""A job that ended before its time, or was given more iterations, ends with the weights of the undisturbed run."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from contracts.jobs import JobState, ResumeRequest
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from tests.chaos.short_job import assert_undisturbed, committed, sequential_digest, short_job, until
from tests.integration.fence_parts import end_leases
from tests.pipeline import Pipeline, wait_for_exit
from tests.sequential_execution import digests_of_versions

NUM_GENERATORS = 1
FAILED = 2
"""Exit code of a trainer whose job failed."""


# Only what a trainer saves at its end, so that a test sees it.
spec = short_job.but(iterations=6, trainer__checkpoint_every_iterations=100)
"""Jobs of 4 training batches an iteration, and 4 evaluation batches before and after."""


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline, tmp_path_factory: pytest.TempPathFactory) -> str:
    return sequential_digest(pipeline, spec(), tmp_path_factory.mktemp("oracle"))


def checkpoints(pipeline: Pipeline, job_id: str) -> list[str]:
    return sorted(path.name for path in RunFolder(pipeline.settings.run_root_path, job_id).checkpoints.iterdir())


def test_a_job_that_succeeded_and_is_given_more_iterations_ends_as_if_it_had_had_them_from_the_start(
    pipeline: Pipeline, oracle: str
) -> None:
    job_id = pipeline.train(spec(iterations=4))
    pipeline.jobs.resume(job_id, ResumeRequest(iterations=6))
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, oracle)
    # Iteration 4 only evaluated, and is committed a second time with its training.
    assert pipeline.verdict(job_id).rewinds == 1


def test_a_job_that_was_cancelled_and_one_whose_batches_died_lose_nothing_when_they_are_resumed(
    pipeline: Pipeline, oracle: str
) -> None:
    pipeline.children["producer-1"].stop(grace_s=10.0)
    # A copy of what the dead one has claimed would be no attempt; no lease runs out, however slow the machine is.
    alone = {"rollout__max_attempts": 1, "rollout__hedge": False, "timeouts__generator_lease_s": 60.0}
    job_id = cancelled_in_iteration_2(pipeline, spec(**alone, evaluation__num_prompts=0))
    pipeline.jobs.resume(job_id)
    generator = pipeline.start("producer-second", crash_at="producer.after_scoring:1")
    trainer = pipeline.start(f"consumer-{job_id}-dies", job_id)
    assert wait_for_exit(generator) == -signal.SIGKILL, generator.tail()
    end_leases(pipeline.broker, pipeline.broker.job_keys(job_id), iteration=2)
    # It finds what the dead one had claimed, for the only time.
    pipeline.start("producer-third")
    assert wait_for_exit(trainer) == FAILED, trainer.tail()
    assert b"is dead, after 1 attempt" in pipeline.jobs.fields(job_id)["reason"]
    pipeline.jobs.resume(job_id)
    pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, oracle)
    assert pipeline.verdict(job_id).rewinds == 0


def test_a_job_whose_gradient_is_beyond_its_sums_ends_once_a_resume_has_widened_them(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    """Rewards of 32,000: the reason names the bits, and what they make is what the spec with them makes."""
    large = spec(
        iterations=1,
        evaluation__num_prompts=0,
        algorithm__loss="grpo",
        algorithm__advantage="dr_grpo",
        reward__components=[{"type": "exact", "weight": 1000.0}] * 32,
        # The range is divided among the batches of an iteration.
        rollout__batches_per_iteration=64,
        rollout__prompts_per_batch=4,
    )
    if not any("producer" in name and child.is_running for name, child in pipeline.children.items()):
        pipeline.start("producer-fourth")
    job_id, _ = pipeline.jobs.create(large)
    assert wait_for_exit(pipeline.start(f"consumer-{job_id}", job_id)) == FAILED
    reason = pipeline.jobs.fields(job_id)["reason"].decode()
    found = re.search(r"beyond the range of exact sums.*\(resume it with --wider-sums (\d+);", reason)
    assert found is not None, reason
    pipeline.jobs.resume(job_id, ResumeRequest(wider_sums=int(found[1])))
    pipeline.train_to_the_end(job_id)
    widened = pipeline.jobs.spec(job_id)
    assert [one.bits for one in widened.trainer.wider_sums or ()] == [int(found[1])]
    assert_undisturbed(pipeline, job_id, sequential_digest(pipeline, widened, tmp_path))


def test_sums_that_are_widened_leave_the_iterations_before_as_they_were(pipeline: Pipeline, tmp_path: Path) -> None:
    """What a resume trains again, from a checkpoint before what was committed, comes to the committed weights."""
    plain = spec(iterations=4)
    wider = spec(iterations=4, trainer__wider_sums=[{"first_iteration": 1, "bits": 12}])
    before, after = (
        digests_of_versions(one, pipeline.settings, tmp_path / name) for name, one in (("a", plain), ("b", wider))
    )
    assert before[:2] == after[:2]
    assert before[2] != after[2]


def cancelled_in_iteration_2(pipeline: Pipeline, spec: JobSpec) -> str:
    """The only generator dies in that iteration, so that its trainer waits when the cancel comes.

    It dies with the third batch of it scored, so that two are published at most; the spec has no evaluation, whose
    batches may be taken before or after those of the next iteration.
    """
    assert spec.evaluation.num_batches == 0
    job_id, _ = pipeline.jobs.create(spec)
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    third = 2 * spec.rollout.batches_per_iteration + 3
    generator = pipeline.start("producer-first", crash_at=f"producer.after_scoring:{third}")
    assert wait_for_exit(generator) == -signal.SIGKILL, generator.tail()
    until(committed(pipeline, job_id, 2), "iteration 1 to be committed")
    pipeline.jobs.request_cancel(job_id)
    assert wait_for_exit(trainer) == 0
    assert pipeline.jobs.state(job_id) is JobState.CANCELLED
    assert checkpoints(pipeline, job_id) == ["i000001"]
    return job_id
