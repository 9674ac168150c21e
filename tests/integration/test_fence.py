"""The fence against a real server: what may be published and committed, and what survives a death."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from broker.connection.client import Broker, connect
from broker.connection.roles import GENERATOR, ROLES, TRAINER, UNSEALED
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.leases import FailOutcome
from broker.openings import IterationOpening
from broker.trainer_side import TrainerSide
from contracts.errors import ContractViolation, FencedOff
from contracts.events import Rewound
from contracts.jobs import JobState
from contracts.rollouts import PromptBatch
from contracts.settings import StackSettings
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import DIGEST, commit_record, job_spec, manifest, prompt_batch
from tests.integration.window_parts import answer_to, claimed


@dataclass
class Job:
    broker: Broker
    """The gateway's, or the operator's, which may do everything."""
    job_id: str
    trainer: TrainerSide
    generators: Broker | None = None
    """Theirs, where it is another user's."""
    sides: dict[str, GeneratorSide] = field(default_factory=dict)

    def generator(self, name: str = "g1") -> GeneratorSide:
        """One process of this name: it knows what it has claimed."""
        made = GeneratorSide(self.generators or self.broker, self.job_id, name)
        return self.sides.setdefault(name, made)

    def batches(self, iteration: int, count: int = 2) -> tuple[PromptBatch, ...]:
        return tuple(
            prompt_batch(
                [[1, 2], [3]],
                job_id=self.job_id,
                batch_id=f"{iteration}/train/{index}",
                iteration=iteration,
                policy_version=iteration,
                weights_digest=DIGEST,
            )
            for index in range(count)
        )

    def opening(self, iteration: int, count: int = 2) -> IterationOpening:
        return IterationOpening(
            iteration=iteration,
            oldest_version=iteration,
            newest_version=iteration,
            batches=self.batches(iteration, count),
        )

    def announce(self, version: int) -> None:
        self.trainer.publish_weights(manifest(version), oldest_kept=0)


def opened(broker: Broker, *, count: int = 2, **changes: object) -> Job:
    """A running job whose iteration 0 is open with so many batches."""
    jobs = JobStore(broker)
    job_id, _ = jobs.create(job_spec(**changes))
    jobs.move(job_id, JobState.RUNNING)
    trainer = TrainerSide(broker, job_id, owner="t1", lease_s=600.0)
    trainer.acquire()
    job = Job(broker, job_id, trainer)
    job.announce(0)
    trainer.open_iteration(job.opening(0, count), {0: DIGEST})
    return job


def job_of(gateway: Broker, trainers: Broker, generators: Broker) -> Job:
    """A job whose version 0 is announced; each side has its own user."""
    job_id, _ = JobStore(gateway).create(job_spec(rollout__max_attempts=2))
    trainer = TrainerSide(trainers, job_id, owner="t1", lease_s=30)
    trainer.acquire()
    job = Job(gateway, job_id, trainer, generators)
    job.announce(0)
    return job


@pytest.fixture(name="job")
def job_of_roles(redis_server: EmbeddedRedis) -> Job:
    redis_server.load_scripts()
    operator, trainers, generators = (
        connect(StackSettings(redis_url=url))
        for url in (redis_server.url, redis_server.url_of(TRAINER), redis_server.url_of(GENERATOR))
    )
    return job_of(operator, trainers, generators)


def test_an_iteration_flows_from_open_to_commit_and_opens_the_next(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    generator = job.generator()
    for _ in range(2):
        claim = claimed(generator, 10)
        assert claim.manifest == manifest(0)
        another = answer_to(claim.prompt_batch, "g1", batch_id="0/train/9")
        with pytest.raises(ContractViolation, match=f"claimed {claim.prompt_batch.batch_id}, got 0/train/9"):
            generator.publish(claim, another)
        assert generator.publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    assert generator.claim(10) is None
    arrived, dead = job.trainer.claim_rollouts(0, max_batches=8)
    trained = {one.batch.batch_id: one.digest for one in arrived}
    assert sorted(trained) == ["0/train/0", "0/train/1"]
    assert dead == 0
    assert job.trainer.columns(arrived[0].batch) == {}, "it has no stages"
    job.announce(1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=job.opening(1), next_version=(1, DIGEST))
    fence = job.trainer.fence()
    assert (fence.committed, fence.iteration, fence.state, fence.policy_version) == (0, 1, "open", 1)
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=job.opening(1), next_version=(1, DIGEST))
    assert len(JobStore(job.broker).audit(job.job_id)) == 1


def test_a_late_generator_cannot_publish_into_a_closed_iteration(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, 1), {0: DIGEST})
    late, quick = job.generator("late"), job.generator("quick")
    stuck = late.claim(0.001)
    assert stuck is not None
    time.sleep(0.01)
    again = quick.claim(0.001)
    assert again is not None
    assert again.attempt == 2
    assert late.renew([stuck]).lost == (stuck,)
    assert quick.publish(again, answer_to(again.prompt_batch, "quick", attempt=2)) is PublishOutcome.ACCEPTED
    assert late.publish(stuck, answer_to(stuck.prompt_batch, "late")) is PublishOutcome.DUPLICATE
    trained = {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(0, max_batches=8)[0]}
    job.trainer.commit(commit_record(0, trained), trained, event=None, opening=None, next_version=None)
    assert late.publish(stuck, answer_to(stuck.prompt_batch, "late")) is PublishOutcome.CLOSED


def test_a_batch_that_keeps_failing_is_dead_lettered_with_its_reason(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, 1), {0: DIGEST})
    generator = job.generator()
    first = generator.claim(10)
    assert first is not None
    assert generator.fail(first, "no reward") is FailOutcome.RETRIED
    assert generator.fail(first, "no reward") is FailOutcome.SETTLED
    second = generator.claim(10)
    assert second is not None
    assert second.attempt == 2
    assert generator.fail(second, "no reward: the scorer said 5:3") is FailOutcome.DEAD
    assert job.trainer.claim_rollouts(0, max_batches=1)[1] == 1
    assert job.trainer.dead_batches(0) == {"0/train/0": "no reward: the scorer said 5:3"}


def test_a_server_without_our_roles_is_given_the_library_by_who_calls_first(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        operator = connect(StackSettings(redis_url=server.url))
        operator.redis.acl_deluser(*ROLES)
        operator.redis.function_flush()
        job = job_of(operator, operator, operator)
        assert operator.seal == UNSEALED
        operator.redis.function_flush()
        assert job.trainer.open_iteration(job.opening(0, 1), {0: DIGEST}) is True


def test_a_rewind_is_recorded_once_however_often_it_is_sent(job: Job) -> None:
    rewind = commit_record(0, {})
    job.trainer.rewind(rewind)
    job.trainer.rewind(rewind)
    jobs = JobStore(job.broker)
    assert jobs.audit(job.job_id) == [rewind]
    told = [event for _, event in jobs.events_after(job.job_id, "0-0") if isinstance(event, Rewound)]
    assert [(event.iteration, event.committed, event.trainer_epoch) for event in told] == [
        (0, -1, rewind.trainer_epoch)
    ]


def test_a_trainer_that_never_acquired_is_fenced_off(settings: StackSettings) -> None:
    broker = connect(settings)
    job_id, _ = JobStore(broker).create(job_spec())
    job = Job(broker, job_id, TrainerSide(broker, job_id, owner="t1", lease_s=600))
    for call in (lambda: job.announce(0), job.trainer.fence, lambda: job.trainer.trainer_epoch):
        with pytest.raises(FencedOff):
            call()
    job.trainer.acquire()
    job.trainer.release()
    assert job.trainer.fence().trainer_epoch == job.trainer.trainer_epoch
    TrainerSide(broker, job_id, owner="t2", lease_s=600).acquire()
    with pytest.raises(FencedOff):
        job.trainer.fence()
