"""An iteration of any number of batches: it opens in pieces, a death between them heals, and waiting costs nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from broker import openings, trainer_side
from broker.connection.client import Broker, connect
from broker.job_store import JobStore
from broker.trainer_side import TrainerSide
from contracts.errors import BrokerUnavailable, FenceViolation
from contracts.events import AuditRecord, record_digest
from contracts.settings import StackSettings
from tests.builders import commit_record, job_spec
from tests.integration.fence_parts import lose_prompts
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed

NUM_BATCHES = 10
LEASE_S = 600.0


class CountingBroker(Broker):
    """Records each call's script and bytes, and dies before the n-th call of a script if it is told so."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.redis, broker.patience)
        self.calls: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()
        self.dies_at: tuple[str, int] = ("", 0)

    def run(self, function: str, *payloads: str | int | bytes, **told: Any) -> list[Any]:
        self.calls[function] += 1
        self.num_bytes[function] += sum(len(one) for one in payloads if isinstance(one, bytes))
        if (function, self.calls[function]) == self.dies_at:
            raise BrokerUnavailable("died here")
        return super().run(function, *payloads, **told)


@pytest.fixture
def broker(settings: StackSettings) -> CountingBroker:
    return CountingBroker(connect(settings))


@pytest.fixture(name="job")
def job_with_small_chunks(broker: CountingBroker, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Three batches fit into a script."""
    monkeypatch.setattr(openings, "CHUNK_BATCHES", 3)
    job_id, _ = JobStore(broker).create(job_spec())
    trainer = TrainerSide(broker, job_id, owner="t1", lease_s=LEASE_S)
    trainer.acquire()
    job = Job(broker, job_id, trainer)
    job.announce(0)
    return job


def answer_all(job: Job) -> dict[str, str]:
    generator, iteration = job.generator(), job.trainer.fence().iteration
    while claim := generator.claim(LEASE_S):
        generator.publish(claim, answer_to(claim.prompt_batch, "g1"))
    return {one.batch.batch_id: one.digest for one in job.trainer.claim_rollouts(iteration, max_batches=100)[0]}


def test_an_iteration_opens_in_pieces_and_is_whole_in_the_end(job: Job, broker: CountingBroker) -> None:
    assert job.trainer.open_iteration(job.opening(0, NUM_BATCHES), {0: DIGEST})
    assert (broker.calls["open_iteration"], broker.calls["dispatch"]) == (1, 3)
    assert job.trainer.fence().expected == NUM_BATCHES
    trained = answer_all(job)
    assert list(trained) == [batch.batch_id for batch in job.batches(0, NUM_BATCHES)]
    job.announce(1)
    job.trainer.commit(
        commit_record(0, trained), trained, event=None, opening=job.opening(1, NUM_BATCHES), next_version=(1, DIGEST)
    )
    assert len(answer_all(job)) == NUM_BATCHES


def test_a_piece_is_bounded_by_its_bytes_too(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "CHUNK_BYTES", 1)
    assert [len(chunk.batches) for chunk in openings.dispatch_chunks(job.batches(0, 3))] == [1, 1, 1]


@pytest.mark.parametrize("script", ["open_iteration", "commit_iteration"])
def test_a_trainer_that_dies_between_two_pieces_leaves_an_iteration_that_is_made_whole(
    job: Job, broker: CountingBroker, script: str
) -> None:
    iteration = 0
    if script == "commit_iteration":
        job.trainer.open_iteration(job.opening(0, 1), {0: DIGEST})
        trained, iteration = answer_all(job), 1
        job.announce(1)
        broker.dies_at = ("dispatch", 2)
        with pytest.raises(BrokerUnavailable):
            job.trainer.commit(
                commit_record(0, trained),
                trained,
                event=None,
                opening=job.opening(1, NUM_BATCHES),
                next_version=(1, DIGEST),
            )
    else:
        broker.dies_at = ("dispatch", 2)
        with pytest.raises(BrokerUnavailable):
            job.trainer.open_iteration(job.opening(0, NUM_BATCHES), {0: DIGEST})
    partly = answer_all(job)
    assert len(partly) == 6
    with pytest.raises(FenceViolation, match="missing"):
        job.trainer.commit(linked(job, iteration, partly), partly, event=None, opening=None, next_version=None)
    job.trainer.release()
    successor = job.trainer = TrainerSide(broker, job.job_id, owner="t2", lease_s=LEASE_S)
    successor.acquire()
    assert not successor.open_iteration(job.opening(iteration, NUM_BATCHES), {iteration: DIGEST})
    assert successor.reconcile(iteration, job.batches(iteration, NUM_BATCHES)) == 4
    trained = partly | answer_all(job)
    successor.commit(linked(job, iteration, trained), trained, event=None, opening=None, next_version=None)
    assert successor.fence().committed == iteration


def linked(job: Job, iteration: int, trained: dict[str, str]) -> AuditRecord:
    chain = JobStore(job.broker).audit(job.job_id)
    return commit_record(iteration, trained, previous=record_digest(chain[-1]) if chain else "")


def test_who_waits_sends_no_payload_and_of_what_is_lost_only_that(
    job: Job, broker: CountingBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten batches, asked for by four: whether all are there takes a single call that names none."""
    monkeypatch.setattr(trainer_side, "ASKED_AT_ONCE", 4)
    job.trainer.open_iteration(job.opening(0, NUM_BATCHES), {0: DIGEST})
    broker.num_bytes.clear()
    broker.calls.clear()
    batches = job.batches(0, NUM_BATCHES)
    assert job.trainer.reconcile(0, batches) == 0
    assert (broker.calls["reconcile"], broker.num_bytes["reconcile"], broker.calls["dispatch"]) == (1, 0, 0)
    prompts: Any = broker.redis.hget(broker.job_keys(job.job_id).slots[0].prompts, "0/train/4")
    lose_prompts(broker, broker.job_keys(job.job_id), "0/train/4")
    assert job.trainer.reconcile(0, batches) == 1
    assert broker.calls["reconcile"] == 1 + 1 + 3
    assert broker.num_bytes["dispatch"] == len(prompts)


def test_an_idle_generator_that_would_hedge_looks_at_few_batches(job: Job, broker: CountingBroker) -> None:
    job.trainer.open_iteration(job.opening(0, NUM_BATCHES), {0: DIGEST})
    generator = job.generator()
    for _ in range(3):
        claim = claimed(generator)
        generator.publish(claim, answer_to(claim.prompt_batch, "g1"))
    others = job.generator("g2")
    while others.claim(LEASE_S):
        pass
    broker.redis.config_resetstat()
    generator.claim(LEASE_S, hedge=True)
    calls = {name: row["calls"] for name, row in broker.redis.info("commandstats").items()}
    assert "cmdstat_hgetall" not in calls
    assert calls["cmdstat_hget"] < NUM_BATCHES


def test_the_chain_is_read_some_records_at_a_time(job: Job, broker: CountingBroker) -> None:
    for iteration in range(40):
        job.announce(iteration)
        job.trainer.open_iteration(job.opening(iteration, 1), {iteration: DIGEST})
        trained = answer_all(job)
        job.trainer.commit(linked(job, iteration, trained), trained, event=None, opening=None, next_version=None)
    jobs = JobStore(broker)
    chain = jobs.audit(job.job_id)
    outline, link = jobs.audit_outline(job.job_id)
    assert [one.iteration for one in outline] == [one.iteration for one in chain] == list(range(40))
    assert link == record_digest(chain[-1])
    assert all(one.batches for one in chain)
    assert not any(one.batches for one in outline)
