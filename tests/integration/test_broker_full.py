"""A server at maxmemory refuses payloads, and nothing else; one that can't save, or is busy, is waited for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from broker.connection.client import Broker, connect
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.monitor import job_status
from broker.presence import Presence
from broker.trainer_side import TrainerSide
from contracts.errors import BrokerFull, BrokerUnavailable, InvalidInput
from contracts.events import IterationCommitted, TrainerStarted
from contracts.jobs import EvaluationScore, JobState
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, job_spec
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, opened

LEASE_S = 600.0
STARTED = TrainerStarted(at_s=0.0, trainer_epoch=1, next_iteration=0, resumed=False)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        broker = connect(StackSettings(redis_url=server.url))
        yield broker
        broker.close()


@pytest.fixture(name="job")
def opened_job(broker: Broker) -> Job:
    return opened(broker)


def limit(broker: Broker, num_bytes: int) -> None:
    """Limits the server's memory; 0 is no limit."""
    broker.redis.config_set("maxmemory", num_bytes)


def test_a_full_server_refuses_rollouts_and_new_jobs_until_there_is_room(broker: Broker, job: Job) -> None:
    generator = job.generator()
    claim = claimed(generator)
    batch = answer_to(claim.prompt_batch, "g1", attempt=claim.attempt)
    limit(broker, 1)
    with pytest.raises(BrokerFull, match="maxmemory"):
        generator.publish(claim, batch)
    with pytest.raises(BrokerFull):
        JobStore(broker).create(job_spec())
    assert (
        job_status(broker, job.job_id).reason == "waits for room in Redis, which is at maxmemory: raise it, or end jobs"
    )
    generator.renew([claim])
    assert job.trainer.fence().published == 0
    limit(broker, 0)
    assert generator.publish(claim, batch) is PublishOutcome.ACCEPTED
    assert "room" not in job_status(broker, job.job_id).reason


def test_a_full_server_goes_on_hearing_those_that_it_knows_and_takes_few_new_ones(broker: Broker) -> None:
    """A run may need another generator to go on; thousands of invented ones would fill what is left of the memory."""
    presence = Presence(broker)
    for number in range(40):
        presence.beat(GeneratorSeen(worker_id=f"known {number}", doing="x" * 10_000))
    limit(broker, 1)
    presence.beat(GeneratorSeen(worker_id="known 7", doing="y" * 10_000))
    with pytest.raises(InvalidInput, match=r"the limit is|too many"):
        presence.beat(GeneratorSeen(worker_id="known 7", doing="y" * 10_100))
    with pytest.raises(InvalidInput, match=r"the limit is|too many"):
        presence.beat(GeneratorSeen(worker_id="new", doing="x" * 5000))
    for number in range(24):
        presence.beat(GeneratorSeen(worker_id=f"new {number}", doing="x" * 3000))
    with pytest.raises(BrokerFull, match="maxmemory"):
        presence.beat(GeneratorSeen(worker_id="one too many"))
    presence.leave("known 7")
    presence.beat(GeneratorSeen(worker_id="one too many"))
    names = [generator.worker_id for generator in presence.live()]
    assert len(names) == 64
    assert "one too many" in names
    limit(broker, 0)
    presence.beat(GeneratorSeen(worker_id="another", doing="x" * 10_000))


def test_a_full_server_answers_what_it_refuses_anyway_and_counts_it(broker: Broker, job: Job) -> None:
    """If it didn't, a generator would hold a batch that isn't wanted for as long as the server is full."""
    generator = job.generator()
    claim = claimed(generator)
    limit(broker, 1)
    late = answer_to(claim.prompt_batch, "g1", attempt=claim.attempt, iteration=1)
    assert generator.publish(claim, late) is PublishOutcome.FUTURE
    limit(broker, 0)
    assert generator.publish(claim, late) is PublishOutcome.FUTURE
    assert job_status(broker, job.job_id).batches_rejected == {"future": 2}


def test_a_full_server_takes_heartbeats_commits_failures_and_state_changes(broker: Broker, job: Job) -> None:
    generator, jobs = job.generator(), JobStore(broker)
    for _ in range(2):
        claim = claimed(generator)
        assert generator.publish(claim, answer_to(claim.prompt_batch, "g1", attempt=claim.attempt)) is (
            PublishOutcome.ACCEPTED
        )
    limit(broker, 1)
    Presence(broker).beat(GeneratorSeen(worker_id="g1"))
    assert [worker.worker_id for worker in Presence(broker).live()] == ["g1"]
    assert job.trainer.renew() is JobState.RUNNING
    trained = {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(0, max_batches=8)[0]}
    job.announce(1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=job.opening(1), next_version=(1, DIGEST))
    assert (job.trainer.fence().committed, job.trainer.fence().iteration) == (0, 1)
    claim = claimed(generator)
    generator.fail(claim, "the engine failed")
    assert job.trainer.reconcile(1, job.batches(1)) == 0
    jobs.tell(job.job_id, STARTED)
    jobs.record_evaluation(
        job.job_id, EvaluationScore(iteration=0, policy_version=0, sampled=0.5, greedy=None, num_prompts=8)
    )
    assert jobs.count_trainer_start(job.job_id) == 1
    jobs.reset_trainer_starts(job.job_id)
    assert jobs.reserve_start(job.job_id, "c1", life_s=60.0)
    assert broker.durability.persisted()
    assert jobs.request_cancel(job.job_id) is JobState.CANCELLING
    told = [event for _, event in jobs.events_after(job.job_id, "0-0")]
    assert STARTED in told
    assert not any(isinstance(event, IterationCommitted) for event in told)
    successor = TrainerSide(broker, job.job_id, owner="t2", lease_s=LEASE_S)
    job.trainer.release()
    assert successor.acquire() > job.trainer.trainer_epoch
    assert jobs.move(job.job_id, JobState.CANCELLED)


def test_a_server_that_cannot_save_is_unavailable_and_then_serves_again(broker: Broker, job: Job) -> None:
    """MISCONF: the disk takes no snapshot, and the server refuses writes until it does."""
    impatient = connect_again(broker, patience_s=1.0)
    folder = broker.redis.config_get("dir")["dir"]
    (Path(folder) / "dump.rdb" / "is-a-folder").mkdir(parents=True)
    broker.redis.config_set("save", "3600 1")
    broker.redis.bgsave()
    while broker.redis.info("persistence")["rdb_bgsave_in_progress"]:
        time.sleep(0.01)
    with pytest.raises(BrokerUnavailable, match="disk"):
        GeneratorSide(impatient, job.job_id, "g1").claim(LEASE_S)
    with pytest.raises(BrokerUnavailable, match="disk"):
        Presence(impatient).beat(GeneratorSeen(worker_id="g1"))
    broker.redis.config_set("save", "")
    assert GeneratorSide(impatient, job.job_id, "g1").claim(LEASE_S) is not None


def test_a_server_that_runs_a_long_script_is_unavailable_and_then_serves_again(broker: Broker, job: Job) -> None:
    impatient = connect_again(broker, patience_s=1.0)
    broker.redis.config_set("busy-reply-threshold", 10)
    long = threading.Thread(target=run_until_killed, args=(connect_again(broker, patience_s=60.0),))
    long.start()
    until_busy(broker.redis)
    with pytest.raises(BrokerUnavailable, match="long script"):
        GeneratorSide(impatient, job.job_id, "g1").claim(LEASE_S)
    broker.redis.script_kill()
    long.join()
    assert GeneratorSide(impatient, job.job_id, "g1").claim(LEASE_S) is not None


def connect_again(broker: Broker, *, patience_s: float) -> Broker:
    """Another client of the same server."""
    options = broker.redis.connection_pool.connection_kwargs
    url = f"unix://:{options['password']}@{options['path']}?db=0"
    return connect(StackSettings(redis_url=url), patience_s=patience_s)


def until_busy(redis: Redis) -> None:
    while True:
        pipe = redis.pipeline(transaction=False)
        pipe.ping()
        if "BUSY" in str(pipe.execute(raise_on_error=False)[0]):
            return


def run_until_killed(broker: Broker) -> None:
    with contextlib.suppress(ResponseError):
        broker.redis.eval("while true do end", 0)
