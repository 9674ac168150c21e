"""One kind of engine samples a deterministic job: its scripts against a real server, also one that forgets (I7)."""

from __future__ import annotations

from typing import Any

import pytest

from broker.connection.client import connect
from broker.connection.roles import GENERATOR, TRAINER
from broker.fence import read_fence
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from contracts.errors import FenceViolation, WrongEngine
from contracts.jobs import JobState
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, job_of

KIND, OTHER = "transformers 5 on AVX2", "vllm 0.32 on H200"


@pytest.fixture(name="job")
def opened_job_of_roles(redis_server: EmbeddedRedis) -> Job:
    redis_server.load_scripts()
    urls = (redis_server.url, redis_server.url_of(TRAINER), redis_server.url_of(GENERATOR))
    job = job_of(*(connect(StackSettings(redis_url=url)) for url in urls))
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    return job


def side(job: Job, name: str, engine: str | None) -> GeneratorSide:
    assert job.generators
    return GeneratorSide(job.generators, job.job_id, name, engine=engine)


def publish(generator: GeneratorSide, name: str, claim: Claim, **changes: object) -> PublishOutcome:
    return generator.publish(claim, answer_to(claim.prompt_batch, name, **changes))


def kept(job: Job) -> str:
    return read_fence(job.broker, job.broker.job_keys(job.job_id)).engine


def forget(job: Job) -> None:
    """As a restart would that has lost all claims and publications."""
    job.broker.redis.hdel(job.broker.job_keys(job.job_id).progress, "engine")


def test_the_first_claim_says_which_kind_of_engine_samples_the_job_and_others_are_told_of_both(job: Job) -> None:
    first, same, other = side(job, "g1", KIND), side(job, "g2", KIND), side(job, "g3", OTHER)
    assert kept(job) == ""
    claim = claimed(first)
    assert kept(job) == KIND
    for hedge in (False, True):
        with pytest.raises(WrongEngine, match=rf"{job.job_id}: is sampled with \({KIND}\).*has \({OTHER}\)") as caught:
            other.claim(600, hedge=hedge)
        assert caught.value.job_engine == KIND
    assert publish(first, "g1", claim) is PublishOutcome.ACCEPTED
    assert publish(same, "g2", claimed(same)) is PublishOutcome.ACCEPTED
    assert (kept(job), side(job, "g3", KIND).claim(600)) == (KIND, None)


def test_a_generator_that_finds_no_work_does_not_say_which_kind_samples_the_job(job: Job) -> None:
    generator = side(job, "g1", None)
    for _ in range(2):
        claimed(generator)
    assert side(job, "g2", OTHER).claim(600) is None
    assert kept(job) == ""


def test_a_publication_that_comes_after_another_kind_was_chosen_is_refused_and_counted(job: Job) -> None:
    late, first = side(job, "g1", OTHER), side(job, "g2", KIND)
    claim = claimed(late)
    forget(job)
    claimed(first)
    assert publish(late, "g1", claim) is PublishOutcome.WRONG_ENGINE
    assert job.broker.redis.hget(job.broker.job_keys(job.job_id).counters, "rejected:wrong_engine") == b"1"
    assert job.broker.redis.xlen(job.broker.job_keys(job.job_id).slots[0].rollouts) == 0


def trained(job: Job, *generators: tuple[str, GeneratorSide]) -> dict[str, str]:
    """Each publishes a batch, which the trainer takes; a restart forgets the kind after each. Batch id → digest."""
    found = {}
    for name, generator in generators:
        assert publish(generator, name, claimed(generator)) is PublishOutcome.ACCEPTED
        arrived, _ = job.trainer.claim_rollouts(0, max_batches=8)
        found |= {one.batch.batch_id: one.digest for one in arrived}
        forget(job)
    return found


def commit(job: Job, batches: dict[str, str]) -> None:
    job.trainer.commit(commit_record(0, batches), batches, event=None, opening=None, next_version=None)


def test_what_two_kinds_have_sampled_across_a_restart_is_not_committed(job: Job) -> None:
    batches = trained(job, ("g1", side(job, "g1", KIND)), ("g2", side(job, "g2", OTHER)))
    job.broker.redis.hset(job.broker.job_keys(job.job_id).progress, "engine", OTHER)
    with pytest.raises(FenceViolation, match=rf"wrong_engine.*{OTHER}"):
        commit(job, batches)
    assert read_fence(job.broker, job.broker.job_keys(job.job_id)).committed == -1


@pytest.mark.parametrize(("is_committed", "expected"), [(False, ""), (True, KIND)])
def test_a_resumed_job_keeps_its_kind_unless_nothing_was_committed(job: Job, is_committed: bool, expected: str) -> None:
    jobs: Any = JobStore(job.broker)
    jobs.move(job.job_id, JobState.RUNNING)
    batches = trained(job, *[("g1", side(job, "g1", KIND))] * 2)
    if is_committed:
        commit(job, batches)
    else:
        job.broker.redis.hset(job.broker.job_keys(job.job_id).progress, "engine", KIND)
    jobs.move(job.job_id, JobState.FAILED, reason="no generator")
    assert kept(job) == KIND
    jobs.resume(job.job_id)
    assert kept(job) == expected
