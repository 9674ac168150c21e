"""Guards of scripts that stand behind another one: each test opens the first, as a lost write or a bug would."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from broker.connection.client import connect
from broker.generator_side import Claim, PublishOutcome
from broker.job_store import JobStore
from broker.keys import JobKeys
from broker.leases import FailOutcome
from broker.ledger import BatchRecord, Dead, Published, batch_record
from broker.monitor import job_status
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode
from contracts.errors import FencedOff, FenceViolation, NotFound
from contracts.events import StateChanged
from contracts.jobs import EvaluationScore, JobState
from contracts.settings import StackSettings
from contracts.versions import WeightShard
from onbeat.stack.redis import EmbeddedRedis
from tests.builders import commit_record, job_spec
from tests.every_key import every_key
from tests.integration.fence_checks import read
from tests.integration.fence_parts import change_fence
from tests.integration.test_fence import DIGEST, Job, answer_to, claimed, job_of, manifest


@pytest.fixture(name="job")
def job_of_operators(redis_server: EmbeddedRedis) -> Job:
    redis_server.load_scripts()
    operator = connect(StackSettings(redis_url=redis_server.url))
    return job_of(operator, operator, operator)


def keys(job: Job) -> JobKeys:
    return job.broker.job_keys(job.job_id)


def ledger(job: Job, batch_id: str) -> BatchRecord:
    held: Any = job.broker.redis.hget(keys(job).slots[0].ledger, batch_id)
    return batch_record(held)


def publish(job: Job) -> Claim:
    """The next batch, answered."""
    claim = claimed(job.generator(), 10)
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.ACCEPTED
    return claim


def test_nothing_is_claimed_of_an_iteration_that_is_closed_though_a_prompt_is_left(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    change_fence(job.broker, keys(job), is_open=False)
    assert job.generator().claim(10) is None


def test_nothing_is_claimed_of_a_job_that_has_ended_though_its_iteration_is_open(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    job.broker.redis.hset(keys(job).job, "state", "cancelled")
    assert job.generator().claim(10) is None


def test_a_prompt_whose_batch_is_published_is_never_claimed(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    claim = publish(job)
    published = ledger(job, "0/train/0")
    assert isinstance(published, Published)
    job.broker.redis.hset(keys(job).slots[0].prompts, "0/train/0", encode(claim.prompt_batch))
    job.broker.redis.zadd(keys(job).slots[0].work, {"0/0/train/0/0": 0})
    assert job.generator("g2").claim(10) is None
    assert ledger(job, "0/train/0") == published
    assert job.broker.redis.zcard(keys(job).slots[0].work) == 0


def test_a_claim_of_rollouts_that_a_restart_has_forgotten_is_empty_and_no_error(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    job.broker.redis.delete(keys(job).slots[0].rollouts)
    assert job.trainer.claim_rollouts(0, max_batches=8) == ([], 0)


def test_a_successor_is_given_no_more_than_it_asked_of_what_is_claimed_and_what_is_new(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=3), {0: DIGEST})
    for _ in range(3):
        publish(job)
    job.trainer.claim_rollouts(0, max_batches=1)
    job.broker.redis.hset(keys(job).fence, "lease_until", 0)
    successor = TrainerSide(job.broker, job.job_id, owner="t2", lease_s=30)
    successor.acquire()
    claimed = [successor.claim_rollouts(0, max_batches=1)[0] for _ in range(3)]
    assert [len(arrived) for arrived in claimed] == [1, 1, 1]


def test_what_a_restart_forgot_was_given_reaches_a_successor_though_the_next_was_read_ahead(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=2), {0: DIGEST})
    rollouts = keys(job).slots[0].rollouts
    publish(job)
    job.trainer.claim_rollouts(0, max_batches=1)
    publish(job)
    job.broker.redis.xgroup_destroy(rollouts, "trainers")
    job.broker.redis.xgroup_create(rollouts, "trainers", "0")
    job.trainer.wait_for_rollouts(0, 10.0)
    job.trainer.claim_rollouts(0, max_batches=8)
    job.broker.redis.hset(keys(job).fence, "lease_until", 0)
    successor = TrainerSide(job.broker, job.job_id, owner="t2", lease_s=30)
    successor.acquire()
    arrived, _ = successor.claim_rollouts(0, max_batches=8)
    assert [one.batch.batch_id for one in arrived] == ["0/train/0", "0/train/1"]


def test_a_claim_of_what_was_read_ahead_leaves_what_came_since_to_the_next(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=2), {0: DIGEST})
    publish(job)
    job.trainer.wait_for_rollouts(0, 10.0)
    publish(job)
    claims = [job.trainer.claim_rollouts(0, max_batches=8)[0] for _ in range(2)]
    assert [[one.batch.batch_id for one in arrived] for arrived in claims] == [["0/train/0"], ["0/train/1"]]


def test_a_batch_that_is_published_cannot_fail_though_its_prompt_is_left(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0, count=1), {0: DIGEST})
    claim = claimed(job.generator(), 10)
    published = Published(entry="1-0", digest="f" * 64, generator="g2", attempt=1)
    job.broker.redis.hset(keys(job).slots[0].ledger, "0/train/0", encode(published))
    assert job.generator().fail(claim, "no reason") is FailOutcome.SETTLED
    assert ledger(job, "0/train/0") == published


def test_there_is_nothing_to_claim_where_a_restart_has_forgotten_the_prompts(job: Job) -> None:
    job.broker.redis.delete(keys(job).slots[0].prompts)
    assert job.generator().claim(10) is None


@pytest.mark.parametrize("entry", [b"", encode(Dead(reason="no reason")), b"none of ours", b"\xc1"])
def test_a_publication_that_nobody_expects_any_more_is_refused(job: Job, entry: bytes) -> None:
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    claim = claimed(job.generator(), 10)
    job.broker.redis.hdel(keys(job).slots[0].ledger, "0/train/0")
    if entry:
        job.broker.redis.hset(keys(job).slots[0].ledger, "0/train/0", entry)
    assert job.generator().publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.UNEXPECTED
    assert job.broker.redis.xlen(keys(job).slots[0].rollouts) == 0


@pytest.mark.parametrize(
    ("epoch_more", "iteration", "is_open", "answer"),
    [
        (1, 0, True, [b"fenced"]),
        (0, 1, True, [b"wrong_iteration", 0]),
        (0, 0, False, [b"wrong_iteration", -1]),
        (0, 0, True, [b"whole"]),
    ],
)
def test_the_script_that_looks_for_what_is_lost_asks_the_fence_itself(
    job: Job, epoch_more: int, iteration: int, is_open: bool, answer: list[bytes | int]
) -> None:
    """A trainer learns of its job's end, and of a lost opening, while it only waits."""
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    epoch = epoch_more + int(job.broker.redis.hget(keys(job).fence, "epoch") or 0)  # type: ignore[arg-type]
    change_fence(job.broker, keys(job), is_open=is_open)
    told = {"epoch": epoch, "iteration": iteration, "batch_ids": []}
    assert job.broker.run("reconcile", job=job.job_id, **told) == answer


def test_a_trainer_whose_epoch_is_over_rewinds_nothing_and_one_that_lives_leaves_no_gap(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = replace(commit_record(0, {}), kind="rewind")
    with pytest.raises(FenceViolation, match="broken_link"):
        job.trainer.rewind(replace(back, previous="f" * 64))
    with pytest.raises(FenceViolation, match="out_of_order"):
        job.trainer.rewind(replace(back, iteration=2, policy_version=2))
    # It looked at the fence while its epoch was the newest.
    monkeypatch.setattr(job.trainer, "fence", functools.partial(lambda seen: seen, job.trainer.fence()))
    job.broker.redis.hset(keys(job).fence, "epoch", "1")
    with pytest.raises(FencedOff):
        job.trainer.rewind(back)
    assert job.broker.redis.xlen(keys(job).audit) == 0


@pytest.mark.parametrize(
    ("spec_before", "num_records", "state", "answer"),
    [
        ("another", 0, "failed", [b"changed"]),
        ("", 1, "failed", [b"changed"]),
        ("", 0, "running", [b"refused", b"running"]),
        ("", 0, "failed", [b"resumed"]),
    ],
)
def test_a_resume_stands_on_what_its_caller_looked_at(
    job: Job, spec_before: str, num_records: int, state: str, answer: list[bytes]
) -> None:
    spec: Any = job.broker.redis.get(keys(job).spec)
    job.broker.redis.hset(keys(job).job, "state", state)
    told = {"job": job.job_id, "allowed": {"failed": True}, "num_records": num_records}
    another = encode(job_spec(seed=7))  # a spec: the gateways of other tests list this server's jobs
    assert another != spec
    assert job.broker.run("resume_job", spec_before or spec, another, "", b"event", **told) == answer
    assert job.broker.redis.get(keys(job).spec) == (another if answer == [b"resumed"] else spec)


def test_a_job_without_a_spec_is_not_resumed(job: Job) -> None:
    job.broker.redis.hset(keys(job).job, "state", "failed")
    job.broker.redis.delete(keys(job).spec)
    told = {"job": job.job_id, "allowed": {"failed": True}, "num_records": 0}
    assert job.broker.run("resume_job", b"", b"another spec", "", b"event", **told) == [b"refused", b"unknown"]
    assert job.broker.redis.hget(keys(job).job, "state") == b"failed"


def test_an_iteration_that_an_older_version_left_open_is_opened_anew(job: Job) -> None:
    """Its ledger has another format: its batches are sampled again, once, and the job goes on."""
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    redis, names = job.broker.redis, keys(job)
    old = job.generator().claim(10)
    assert old is not None
    for batch_id in ("0/train/0", "0/train/1"):
        redis.hset(names.slots[0].ledger, batch_id, "expected:1-0:2x2")
    redis.hset(names.progress, "recent_ms", "100,200")
    redis.hdel(names.fence, "ledger_format")
    assert job.generator("g2").publish(old, answer_to(old.prompt_batch, "g1")) is PublishOutcome.FUTURE
    assert job.generator("g2").claim(10) is None
    assert job_status(job.broker, job.job_id).batches_expected == 0
    job.trainer.release()
    successor = job.trainer = TrainerSide(job.broker, job.job_id, owner="t2", lease_s=30)
    successor.acquire()
    assert successor.open_iteration(job.opening(0), {0: DIGEST}), "opened, not gone on with"
    assert not successor.open_iteration(job.opening(0), {0: DIGEST})
    assert redis.hlen(names.slots[0].prompts) == 2
    trained = {}
    while claim := job.generator("g2").claim(10):
        assert job.generator("g2").publish(claim, answer_to(claim.prompt_batch, "g2")) is PublishOutcome.ACCEPTED
    for arrived in successor.claim_rollouts(0, max_batches=8)[0]:
        trained[arrived.batch.batch_id] = arrived.digest
    successor.commit(commit_record(0, trained), trained, event=None, opening=None, next_version=None)
    assert successor.fence().committed == 0


def test_epochs_and_milliseconds_are_exact_up_to_the_largest_that_lua_counts(job: Job) -> None:
    """Lua's numbers are doubles: 2^53 - 1 and its neighbour must stay two epochs."""
    largest = 2**53 - 1
    job.broker.redis.hset(keys(job).fence, mapping={"epoch": largest - 1, "lease_until": 0})
    successor = TrainerSide(job.broker, job.job_id, owner="t2", lease_s=30)
    assert successor.acquire() == largest
    assert job.broker.redis.hget(keys(job).fence, "epoch") == str(largest).encode()
    successor.renew()
    for epoch, answer in ((largest - 1, b"fenced"), (largest, b"renewed")):
        assert job.broker.run("renew_trainer", job=job.job_id, epoch=epoch, lease_ms=5)[0] == answer
    successor.open_iteration(job.opening(0, count=1), {0: DIGEST})
    job.generator().claim(10)
    claimed = read(job.broker, keys(job)).slots[0].leases["0/train/0"]
    assert job.broker.redis.zscore(keys(job).slots[0].claims, "0/train/0") == claimed.claimed_ms


def test_nothing_of_a_removed_job_comes_back_whoever_calls_late(job: Job) -> None:
    job.trainer.open_iteration(job.opening(0), {0: DIGEST})
    generator, jobs, names = job.generator(), JobStore(job.broker), keys(job)
    claim = claimed(generator, 10)
    job.trainer.release()
    late = TrainerSide(job.broker, job.job_id, owner="t1", lease_s=30)
    late.acquire()
    late.release()
    jobs.move(job.job_id, JobState.CANCELLED)
    jobs.remove(job.job_id)
    score = EvaluationScore(iteration=0, policy_version=0, sampled=1.0, num_prompts=1)
    shard = WeightShard(policy_version=1, path="j/weights/.v000001.0/a", name="a", num_bytes=8)
    refused: list[Callable[[], object]] = [
        late.acquire,
        lambda: job.trainer.publish_weights(manifest(1), oldest_kept=0),
        lambda: job.trainer.announce_shard(shard),
        lambda: job.trainer.record_files(b"a list"),
        lambda: job.trainer.put_chunk(0, "m", 0, b"bytes", keep_s=60),
        lambda: job.trainer.open_iteration(job.opening(0), {0: DIGEST}),
        lambda: job.trainer.reconcile(0, job.batches(0)),
        lambda: job.trainer.commit(commit_record(0, {}), {}, event=None, opening=None, next_version=None),
        lambda: job.trainer.rewind(commit_record(0, {})),
        lambda: job.trainer.claim_rollouts(0, max_batches=1),
        lambda: jobs.move(job.job_id, JobState.FAILED),
        lambda: jobs.count_trainer_start(job.job_id),
    ]
    for call in refused:
        with pytest.raises((FencedOff, NotFound)):
            call()
    assert generator.claim(10) is None
    assert generator.publish(claim, answer_to(claim.prompt_batch, "g1")) is PublishOutcome.FUTURE
    assert generator.fail(claim, "no reward") is FailOutcome.SETTLED
    assert generator.renew([claim]).settled == (claim,)
    jobs.record_evaluation(job.job_id, score)
    jobs.tell(job.job_id, StateChanged(at_s=0.0, state=JobState.FAILED))
    jobs.reset_trainer_starts(job.job_id)
    jobs.uncount_trainer_start(job.job_id)
    assert not jobs.reserve_start(job.job_id, "c1", life_s=60)
    assert job.broker.redis.exists(*every_key(names)) == 0
