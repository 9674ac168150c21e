"""What accumulates has a ceiling: jobs, which can be removed without a trace, and what is kept of dead batches."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker import keys
from broker.connection.client import Broker, connect
from broker.generator_side import GeneratorSide, PublishOutcome
from broker.job_store import JobStore
from broker.keys import OpenKeys
from broker.leases import FailOutcome
from broker.monitor import job_status
from broker.openings import IterationOpening
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode
from contracts.errors import Conflict, FencedOff, NotFound
from contracts.events import TrainerStarted
from contracts.jobs import JobState
from contracts.settings import StackSettings
from contracts.versions import WeightFile, WeightManifest
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import job_spec, prompt_batch, rollout_batch
from tests.integration.window_parts import claimed

DIGEST = "d" * 64


def opened(settings: StackSettings, job_id: str, *, lease_s: float = 60.0, num_batches: int = 2) -> TrainerSide:
    """A trainer with an open iteration."""
    trainer = TrainerSide(connect(settings), job_id, owner="t", lease_s=lease_s)
    trainer.acquire()
    files = (WeightFile(name="m.safetensors", num_bytes=1),)
    trainer.publish_weights(
        WeightManifest(policy_version=0, weights_digest=DIGEST, dtype="float32", directory="w", files=files),
        oldest_kept=0,
    )
    batches = [
        prompt_batch([[1, 2], [3]], job_id=job_id, batch_id=f"0/train/{index}", weights_digest=DIGEST)
        for index in range(num_batches)
    ]
    trainer.open_iteration(
        IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=tuple(batches)), {0: DIGEST}
    )
    return trainer


def keys_of(settings: StackSettings, job_id: str) -> list[bytes]:
    return list(connect(settings).redis.scan_iter(match=f"*{job_id}*", count=10_000))


def test_a_removed_job_leaves_no_key_and_who_comes_late_makes_none(jobs: JobStore, settings: StackSettings) -> None:
    key = uuid.uuid4().hex
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    trainer = opened(settings, job_id)
    jobs.move(job_id, JobState.RUNNING)
    generator = GeneratorSide(connect(settings), job_id, "g1")
    claim = claimed(generator)
    jobs.tell(job_id, TrainerStarted(at_s=1.0, trainer_epoch=7, next_iteration=0, resumed=False))
    jobs.move(job_id, JobState.FAILED, trainer_epoch=trainer.trainer_epoch)
    trainer.release()
    jobs.remove(job_id)
    assert keys_of(settings, job_id) == []
    with pytest.raises(FencedOff):
        trainer.renew()
    batch = rollout_batch(job_id=job_id, batch_id="0/train/0", weights_digest=DIGEST, group_size=2, generator_id="g1")
    assert generator.publish(claim, batch) is not PublishOutcome.ACCEPTED
    assert generator.fail(claim, "late") is FailOutcome.SETTLED
    generator.renew([claim])
    assert generator.claim(60.0) is None
    assert keys_of(settings, job_id) == []
    assert job_id not in jobs.job_ids()
    with pytest.raises(NotFound):
        jobs.state(job_id)
    with pytest.raises(NotFound):
        jobs.remove(job_id)
    other_id, is_new = jobs.create(job_spec(), idempotency_key=key)
    assert is_new
    assert other_id != job_id


def test_a_job_that_runs_or_whose_trainer_holds_it_is_not_removed(jobs: JobStore, settings: StackSettings) -> None:
    job_id, _ = jobs.create(job_spec())
    for state in (JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING):
        if state is not JobState.QUEUED:
            jobs.move(job_id, state)
        with pytest.raises(Conflict, match=f"a {state.value} job cannot be removed"):
            jobs.remove(job_id)
    trainer = opened(settings, job_id)
    jobs.move(job_id, JobState.CANCELLED, trainer_epoch=trainer.trainer_epoch)
    with pytest.raises(Conflict, match="the job's trainer still holds it"):
        jobs.remove(job_id)
    assert jobs.state(job_id) is JobState.CANCELLED
    trainer.release()
    jobs.remove(job_id)


class Died(Exception):
    """What is left of a process that was killed."""


class MortalBroker(Broker):
    """A broker whose process dies when its first script has answered."""

    def run(self, function: str, *payloads: str | int | bytes, **told: Any) -> list[Any]:
        super().run(function, *payloads, **told)
        raise Died


def test_a_process_that_dies_while_it_removes_a_job_leaves_it_in_no_list(
    jobs: JobStore, settings: StackSettings
) -> None:
    key = uuid.uuid4().hex
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    jobs.move(job_id, JobState.CANCELLED)
    with pytest.raises(Died):
        JobStore(MortalBroker(connect(settings).redis)).remove(job_id)
    assert job_id not in jobs.job_ids()
    assert jobs.create(job_spec(), idempotency_key=key)[1]


def test_a_job_whose_record_is_lost_is_taken_off_the_lists(jobs: JobStore, settings: StackSettings) -> None:
    job_id, _ = jobs.create(job_spec())
    connect(settings).redis.delete(OpenKeys(job_id).job)
    with pytest.raises(NotFound):
        jobs.remove(job_id)
    assert job_id not in jobs.job_ids()
    assert job_id not in jobs.active_jobs()


def test_a_removal_that_is_refused_keeps_the_idempotency_key_and_another_job_s_stays(
    jobs: JobStore, settings: StackSettings
) -> None:
    key = uuid.uuid4().hex
    job_id, _ = jobs.create(job_spec(), idempotency_key=key)
    trainer = opened(settings, job_id)
    jobs.move(job_id, JobState.FAILED, trainer_epoch=trainer.trainer_epoch)
    with pytest.raises(Conflict, match="the job's trainer still holds it"):
        jobs.remove(job_id)
    assert jobs.create(job_spec(), idempotency_key=key) == (job_id, False)
    trainer.release()
    connect(settings).redis.delete(keys.idempotency(key))
    later, _ = jobs.create(job_spec(), idempotency_key=key)
    jobs.remove(job_id)
    assert jobs.create(job_spec(), idempotency_key=key) == (later, False), "the first one's reservation had expired"


def test_at_the_most_jobs_a_new_one_is_refused_until_one_is_removed_and_a_repeat_is_answered(
    settings: StackSettings, tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path / "own") as server:
        jobs = JobStore(connect(replace(settings, redis_url=server.url)))
        first, _ = jobs.create(job_spec(), idempotency_key="k", max_jobs=2)
        jobs.create(job_spec(), max_jobs=2)
        with pytest.raises(Conflict, match="ONBEAT_MAX_JOBS"):
            jobs.create(job_spec(), idempotency_key="other", max_jobs=2)
        assert jobs.create(job_spec(), idempotency_key="k", max_jobs=2) == (first, False)
        assert len(jobs.job_ids()) == 2
        jobs.move(first, JobState.CANCELLED)
        jobs.remove(first)
        assert jobs.create(job_spec(), idempotency_key="other", max_jobs=2)[1]


def test_specs_have_a_bound_together_which_holds_under_concurrency_and_a_removal_makes_room(
    settings: StackSettings, tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path / "own") as server:
        broker = connect(replace(settings, redis_url=server.url))
        jobs, spec = JobStore(broker), job_spec()
        room = int(3.5 * len(encode(spec)))
        refusals: list[str] = []

        def submits(key: int) -> str | None:
            try:
                return jobs.create(spec, idempotency_key=f"k{key}", max_spec_bytes=room)[0]
            except Conflict as error:
                refusals.append(str(error))
                return None

        with ThreadPoolExecutor(8) as pool:
            made = {key: job_id for key, job_id in enumerate(pool.map(submits, range(20))) if job_id}
        assert len(made) == len(jobs.job_ids()) == 3
        assert ["ONBEAT_MAX_SPECS_MB" in one and "onbeat delete" in one for one in refusals] == 17 * [True]
        assert len(list(broker.redis.scan_iter(match="onbeat:idempotency:*"))) == 3, "a refusal leaves no reservation"
        again, first = next(iter(made.items()))
        assert submits(again) == first, "what was accepted needs no room"
        jobs.move(first, JobState.CANCELLED)
        jobs.resume(first)
        jobs.move(first, JobState.CANCELLED)
        jobs.remove(first)
        assert submits(100) not in (None, first)
        assert submits(101) is None
        for job_id in jobs.job_ids():
            jobs.move(job_id, JobState.CANCELLED)
            jobs.remove(job_id)
        assert broker.redis.get(keys.SPEC_BYTES) == b"0"


def test_of_dead_batches_the_newest_reasons_are_kept_cut_and_without_payload(settings: StackSettings) -> None:
    job_id = f"job-{uuid.uuid4().hex[:12]}"
    spec = job_spec(rollout__max_attempts=1)
    store = JobStore(connect(settings))
    job_id, _ = store.create(spec)
    trainer = opened(settings, job_id, num_batches=1100)
    generator = GeneratorSide(connect(settings), job_id, "g1")
    reason = "raised: ü" + "é" * 3000 + "\ud800"
    for _ in range(1100):
        claim = claimed(generator)
        assert generator.fail(claim, reason) is FailOutcome.DEAD
    broker = connect(settings)
    entries = broker.redis.xrange(broker.job_keys(job_id).dead)
    assert len(entries) == 1000
    assert all(set(fields) == {b"batch_id", b"reason", b"attempts"} for _, fields in entries)
    assert max(len(fields[b"reason"]) for _, fields in entries) == 2000
    told = trainer.dead_batches(0)
    assert len(told) == 1100
    assert all(text.startswith("raised: üé") for text in told.values())
    assert job_status(connect(settings), job_id).batches_dead == 1100, "reasons are cut inside a character"


def test_idempotency_keys_expire(jobs: JobStore, settings: StackSettings) -> None:
    key = uuid.uuid4().hex
    jobs.create(job_spec(), idempotency_key=key)
    assert 0 < connect(settings).redis.ttl(keys.idempotency(key)) <= 24 * 3600
