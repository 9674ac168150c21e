"""Claims by their numbers: one whose answer was lost comes again, and none is taken for another of its batch."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide
from broker.leases import FailOutcome
from broker.stage_side import StageSide
from contracts.errors import BrokerUnavailable, FenceViolation
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record
from tests.integration.fence_checks import read
from tests.integration.fence_parts import lose_prompts, set_recent_times
from tests.integration.stage_parts import StagedJob, external, open_job
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, opened

LEASE_S = 600.0
NAME = "host-1-0a1b2c3d"


def job_on(broker: Broker, count: int = 3) -> Job:
    return opened(broker, count=count, rollout__max_attempts=3)


@pytest.fixture(name="job")
def opened_job(settings: StackSettings) -> Job:
    return job_on(connect(settings))


def answer_lost(job: Job, name: str) -> Claim:
    """What the server has leased to a generator that never heard of it: a call whose answer no process read."""
    return claimed(GeneratorSide(job.broker, job.job_id, name))


def num_leased(job: Job, name: str) -> int:
    held = read(job.broker, job.broker.job_keys(job.job_id))
    return sum(one.worker == name for one in held.slots[0].leases.values())


def rewind(job: Job) -> None:
    """The trainer starts again from a checkpoint, and opens the iteration again."""
    job.trainer.rewind(commit_record(0, {}))
    job.announce(0)
    job.trainer.open_iteration(job.opening(0, 3), {0: DIGEST})


def test_a_lost_claim_whose_prompt_is_gone_holds_its_process_up_with_nothing(job: Job) -> None:
    lost = answer_lost(job, NAME)
    lose_prompts(job.broker, job.broker.job_keys(job.job_id), lost.prompt_batch.batch_id)
    assert claimed(job.generator(NAME)).prompt_batch.batch_id == "0/train/1"


def test_batches_go_out_in_the_order_in_which_they_were_sent_and_what_failed_behind_them(
    settings: StackSettings,
) -> None:
    side = job_on(connect(settings), 12).generator(NAME)
    assert side.fail(claimed(side), "no reward") is FailOutcome.RETRIED
    in_order = [claimed(side).prompt_batch.batch_id for _ in range(12)]
    assert in_order == [f"0/train/{index}" for index in (*range(1, 12), 0)]


def test_a_name_that_is_no_text_is_refused_before_anything_is_leased(job: Job) -> None:
    nameless = GeneratorSide(job.broker, job.job_id, 7)  # type: ignore[arg-type]
    with pytest.raises(FenceViolation, match="not a name"):
        nameless.claim(LEASE_S)
    assert num_leased(job, "7") == 0


def test_a_copy_whose_answer_was_lost_comes_again(job: Job) -> None:
    slow = job.generator("slow")
    done, *_ = [claimed(slow) for _ in range(3)]
    slow.publish(done, answer_to(done.prompt_batch, "slow"))
    set_recent_times(job.broker, job.broker.job_keys(job.job_id), [0])
    copy = claimed(GeneratorSide(job.broker, job.job_id, NAME), hedge=True)
    assert copy.hedged
    assert claimed(job.generator(NAME), hedge=True) == copy


def test_what_is_kept_of_who_claims_is_bounded(job: Job) -> None:
    """Names are the callers' own words; who is forgotten waits for the end of a lease, as before it was known."""
    claimers = job.broker.job_keys(job.job_id).claimers
    job.broker.redis.hset(claimers, mapping={str(number): b"\x80" for number in range(4096)})
    assert claimed(job.generator(NAME)).attempt == 1
    assert job.broker.redis.hlen(claimers) == 1
    job.generator("x" * 301).claim(LEASE_S)
    assert job.broker.redis.hkeys(claimers) == [NAME.encode()]


def test_claims_of_several_threads_of_one_generator_are_of_different_batches(job: Job) -> None:
    side = job.generator(NAME)
    with ThreadPoolExecutor(3) as threads:
        claims = list(threads.map(lambda _: claimed(side), range(3)))
    assert len({claim.prompt_batch.batch_id for claim in claims}) == 3


def test_calls_that_a_hanging_server_reads_once_it_goes_on_leave_no_lease_that_is_not_known(
    server: EmbeddedRedis,
) -> None:
    job = job_on(connect(StackSettings(redis_url=server.url)))
    impatient = connect(StackSettings(redis_url=server.url))
    side, patience_s = GeneratorSide(impatient, job.job_id, NAME), impatient.patience.patience_s
    side.wait_for_prompts(0.001)
    assert server.child.pid is not None
    os.kill(server.child.pid, signal.SIGSTOP)
    impatient.patience.patience_s = 0.2
    try:
        for _ in range(3):
            with pytest.raises(BrokerUnavailable):
                side.claim(LEASE_S)
    finally:
        os.kill(server.child.pid, signal.SIGCONT)
    impatient.patience.patience_s = patience_s
    first = claimed(GeneratorSide(job.broker, job.job_id, "another"))
    held = claimed(side)
    assert (held.attempt, num_leased(job, NAME)) == (1, 1)
    assert held.prompt_batch.batch_id != first.prompt_batch.batch_id


@pytest.fixture
def staged(redis_server: EmbeddedRedis) -> StagedJob:
    job = open_job(redis_server, [external("judge", max_attempts=2)])
    job.publish()
    return job


def another_call(job: StagedJob, worker: str) -> StageSide:
    """The same worker has not heard of what this one takes."""
    return StageSide(job.stage(worker).broker, job.job_id, worker)


def test_of_a_lost_claim_of_items_only_those_come_again_that_no_other_has_ended_or_taken(staged: StagedJob) -> None:
    lost = another_call(staged, "s1").claim("judge", 3)
    staged.stage("s2").put([(lost[0], staged.made(lost[0]))])
    staged.expire(lost[1])
    (taken,) = staged.stage("s2").claim("judge")
    assert (taken.item, taken.attempt) == (lost[1].item, 2)
    (again,) = staged.stage("s1").claim("judge", 3)
    assert (again.item, again.claim) == (lost[2].item, lost[2].claim)
