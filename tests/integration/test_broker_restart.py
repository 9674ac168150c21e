"""A server that is killed and started again, with every write or without its last ones, breaks no run.

The tests own their server. Writes are lost for real: the append-only file is cut back to what had been synced.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.connection.client import Broker, connect
from broker.generator_side import Claim, GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.leases import Renewal
from broker.trainer_side import TrainerSide
from contracts.errors import BrokerUnavailable, FencedOff, FenceViolation
from contracts.events import record_digest
from contracts.jobs import JobState
from contracts.settings import StackSettings
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.loop.chain import rewind_record
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, job_spec
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, manifest

LEASE_S = 600.0


@dataclasses.dataclass
class Crash:
    """A private server that can lose what it wrote after a moment."""

    server: EmbeddedRedis
    broker: Broker

    def mark(self) -> int:
        """Size of the append-only file now that everything before is in it."""
        assert self.broker.durability.persisted()
        return self._file().stat().st_size

    def kill_and_restart(self, *, keep_bytes: int | None = None) -> None:
        """Sends SIGKILL and starts the server again; with keep_bytes, without what was written after that mark."""
        self.server.kill()
        if keep_bytes is not None:
            assert self._file().stat().st_size > keep_bytes, "nothing was written after the mark"
            with self._file().open("r+b") as file:
                file.truncate(keep_bytes)
        self.server.restart()

    def _file(self) -> Path:
        (path,) = (self.server.folder / "appendonlydir").glob("*.incr.aof")
        return path


@pytest.fixture
def crash(server: EmbeddedRedis, tmp_path: Path) -> Iterator[Crash]:
    broker = connect(StackSettings(redis_url=server.url, run_root=str(tmp_path)), patience_s=10.0)
    yield Crash(server, broker)
    broker.close()


@pytest.fixture(name="job")
def job_with_two_batches(crash: Crash) -> Job:
    """Iteration 0 is open with two batches."""
    job_id, _ = JobStore(crash.broker).create(
        job_spec(rollout__max_attempts=3, rollout__batches_per_iteration=2, evaluation__num_prompts=0)
    )
    trainer = TrainerSide(crash.broker, job_id, owner="t1", lease_s=LEASE_S)
    trainer.acquire()
    job = Job(crash.broker, job_id, trainer)
    job.announce(0)
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    return job


def publish(generator: GeneratorSide, claim: Claim, name: str) -> PublishOutcome:
    return generator.publish(claim, answer_to(claim.prompt_batch, name, attempt=claim.attempt))


def arrived(job: Job) -> dict[str, str]:
    iteration = job.trainer.fence().iteration
    return {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(iteration, max_batches=8)[0]}


def commit(job: Job, trained: dict[str, str]) -> None:
    job.announce(1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=job.opening(1), next_version=(1, DIGEST))


def test_a_killed_server_goes_on_half_way_through_an_iteration(crash: Crash, job: Job) -> None:
    first, second = job.generator("g1"), job.generator("g2")
    assert publish(first, claimed(first), "g1") is PublishOutcome.ACCEPTED
    trained = arrived(job)
    held = claimed(second)
    crash.kill_and_restart()
    assert job.trainer.renew() is JobState.QUEUED
    assert second.renew([held]) == Renewal()
    assert publish(second, held, "g2") is PublishOutcome.ACCEPTED
    trained |= arrived(job)
    assert sorted(trained) == ["0/train/0", "0/train/1"]
    commit(job, trained)
    assert (job.trainer.fence().committed, job.trainer.fence().iteration) == (0, 1)
    assert claimed(first).prompt_batch.batch_id == "1/train/0"


def test_a_server_that_is_away_is_an_error_with_a_name_and_back_again_it_serves(crash: Crash, job: Job) -> None:
    url = crash.server.url
    crash.server.kill()
    with pytest.raises(BrokerUnavailable):
        connect(StackSettings(redis_url=url), patience_s=0.0)
    crash.server.restart()
    assert job.trainer.fence().iteration == 0
    assert claimed(job.generator()).prompt_batch.batch_id == "0/train/0"


def commit_and_lose_it(crash: Crash, job: Job) -> dict[str, str]:
    """Iteration 0, trained and committed; the server then forgets the commit."""
    generator = job.generator()
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    trained = arrived(job)
    mark = crash.mark()
    commit(job, trained)
    crash.kill_and_restart(keep_bytes=mark)
    return trained


def test_a_commit_that_was_answered_and_lost_is_not_taken_for_done(crash: Crash, job: Job) -> None:
    """If it did, a job would succeed, or a checkpoint be written, with an iteration that the audit chain lacks."""
    trained = commit_and_lose_it(crash, job)
    with pytest.raises(FenceViolation, match="has lost the commit of iteration 0"):
        job.trainer.confirm(0)
    commit(job, trained)
    job.trainer.confirm(0)
    crash.kill_and_restart()
    job.trainer.confirm(0)


def test_no_epoch_is_handed_out_twice_although_its_counter_went_back(crash: Crash, job: Job) -> None:
    first = job.trainer
    mark = crash.mark()
    first.release()
    second = TrainerSide(crash.broker, job.job_id, owner="t2", lease_s=LEASE_S)
    forgotten = second.acquire()
    crash.kill_and_restart(keep_bytes=mark)
    assert first.fence().trainer_epoch == first.trainer_epoch < forgotten
    with pytest.raises(FencedOff):
        second.renew()
    first.release()
    third = TrainerSide(crash.broker, job.job_id, owner="t3", lease_s=LEASE_S)
    assert third.acquire() > forgotten
    for old in (first, second):
        with pytest.raises(FencedOff):
            old.renew()


def test_a_job_that_was_accepted_is_there_after_a_crash(crash: Crash) -> None:
    jobs = JobStore(crash.broker)
    job_id, is_new = jobs.create(job_spec(), idempotency_key="k1")
    crash.kill_and_restart()
    assert is_new
    assert jobs.create(job_spec(), idempotency_key="k1") == (job_id, False)
    assert jobs.job_ids() == jobs.active_jobs() == [job_id]


def test_a_rewind_that_follows_a_lost_record_is_refused_and_the_chain_stays_whole(crash: Crash, job: Job) -> None:
    """A process that lives through a restart may have read a chain that is gone."""
    generator = job.generator()
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    mark = crash.mark()
    slow = job.trainer
    slow.release()
    job.trainer = successor(crash, job)
    commit(job, arrived(job))
    chain = JobStore(crash.broker).audit(job.job_id)
    crash.kill_and_restart(keep_bytes=mark)
    with pytest.raises(FenceViolation, match="broken_link"):
        slow.rewind(rewind_record(record_digest(chain[-1]), manifest(0), trainer_epoch=slow.trainer_epoch))
    assert JobStore(crash.broker).audit(job.job_id) == []
    slow.release()
    job.trainer = successor(crash, job)
    commit(job, arrived(job))
    assert gaps(crash, job) == ((), 1)


def test_a_commit_that_follows_a_lost_record_is_refused_and_the_chain_stays_whole(crash: Crash, job: Job) -> None:
    """A restart that takes a whole replayed iteration leaves its trainer at the number that it stood at before."""
    generator = job.generator()
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    commit(job, arrived(job))
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    job.trainer.release()
    job.trainer = replaying = successor(crash, job)
    mark = crash.mark()
    _, newest = JobStore(crash.broker).audit_outline(job.job_id)
    job.trainer.rewind(rewind_record(newest, manifest(0), trainer_epoch=epoch(job)))
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    link = JobStore(crash.broker).audit(job.job_id)[-1]
    replayed = replace(commit_record(0, arrived(job)), trainer_epoch=epoch(job), previous=record_digest(link))
    replaying.publish_weights(manifest(1), oldest_kept=0)  # the rewind took the one that was made before
    replaying.commit(replayed, replayed.batches, event=None, opening=job.opening(1), next_version=(1, DIGEST))
    crash.kill_and_restart(keep_bytes=mark)
    trained = arrived(job)
    assert sorted(trained) == ["1/train/0", "1/train/1"]
    following = replace(commit_record(1, trained), trainer_epoch=epoch(job), previous=record_digest(replayed))
    with pytest.raises(FenceViolation, match="broken_link"):
        replaying.commit(following, trained, event=None, opening=None, next_version=None)
    replaying.release()
    job.trainer = successor(crash, job)
    trained = arrived(job)
    last = record_digest(JobStore(crash.broker).audit(job.job_id)[-1])
    following = replace(following, trainer_epoch=epoch(job), previous=last)
    for _ in range(2):  # safe to repeat
        job.trainer.commit(following, trained, event=None, opening=None, next_version=None)
    assert gaps(crash, job) == ((), 2)


def test_other_weights_of_a_version_whose_rewind_a_restart_has_lost_are_not_announced(crash: Crash, job: Job) -> None:
    """Generators would load what the window, which is back, refuses. Only a job whose replays differ meets it."""
    generator = job.generator()
    for _ in range(2):
        publish(generator, claimed(generator), "g1")
    commit(job, arrived(job))
    job.trainer.release()
    job.trainer = replaying = successor(crash, job)
    mark = crash.mark()
    _, newest = JobStore(crash.broker).audit_outline(job.job_id)
    replaying.rewind(rewind_record(newest, manifest(0), trainer_epoch=epoch(job)))
    replaying.open_iteration(job.opening(0), {0: DIGEST})
    crash.kill_and_restart(keep_bytes=mark)
    made_anew = replace(manifest(1), weights_digest="c" * 64)
    with pytest.raises(FenceViolation, match="version 1 cannot be announced: divergent"):
        replaying.publish_weights(made_anew, oldest_kept=0)
    assert claimed(generator).manifest == manifest(1)
    replaying.publish_weights(manifest(1), oldest_kept=0)
    replaying.publish_weights(replace(made_anew, policy_version=2), oldest_kept=0)


def successor(crash: Crash, job: Job) -> TrainerSide:
    trainer = TrainerSide(crash.broker, job.job_id, owner=uuid.uuid4().hex, lease_s=LEASE_S)
    trainer.acquire()
    return trainer


def epoch(job: Job) -> int:
    return job.trainer.trainer_epoch


def gaps(crash: Crash, job: Job) -> tuple[tuple[str, ...], int]:
    """(what `onbeat verify` finds missing, iterations that it sees)."""
    jobs = JobStore(crash.broker)
    entries = [AuditEntry(record=one, digest=record_digest(one)) for one in jobs.audit(job.job_id)]
    verdict = verify_run(entries, jobs.spec(job.job_id), complete=False, digests_on_disk={})
    return verdict.gaps, verdict.iterations
